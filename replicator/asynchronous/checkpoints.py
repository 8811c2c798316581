# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of programs that share their variables: the first one writes them."""

from __future__ import annotations

import math

import tensorflow as tf

from replicator.asynchronous import board as boards
from replicator.asynchronous.membership import Member
from replicator.cluster.saving import Alone


class Shared:
    """The checkpoints of all programs, in a directory of the first.

    The first restores the newest, once in the life of the servers: a program that is
    started again while others go on finds the variables as they are, and goes on from
    the step at which it would have saved last.

    Args:
        member: This program.
        number: Which checkpoints these are, of the program's.
        first: Reads and writes them, in the first program.
        done: The variable with the number of steps that are done.
    """

    def __init__(
        self, member: Member, number: int, first: Alone, done: tf.Variable
    ) -> None:
        own, count = member.board.own, member.board.count
        self._own, self._begun, self._first = own, count, first
        self._done = done
        # The steps done by each, and those that were restored; one more, each.
        self._steps = member.store.table(f"checkpoints/{number}", count + 1)

    @property
    def latest(self) -> str | None:
        """The path of the newest on the first host; None elsewhere."""
        return self._first.latest if self._own == 0 else None

    def restore(self) -> None:
        """Restores the newest, if there is one and nobody has yet."""
        if self._own == 0 and not self._known(self._begun):
            self._first.restore()
            self._tell(self._begun, int(self._done))
        boards.wait(lambda: self._known(self._begun) > 0, math.inf)
        self._done.assign(self._known(self._own) or self._known(self._begun))
        self._done.assign_sub(1)

    def save(self, number: int) -> str:
        """Writes one, in the first program; notes how far this one is."""
        path = self._first.save(number) if self._own == 0 else ""
        self._tell(self._own, number)
        return path

    def _known(self, index: int) -> int:
        return int(self._steps.numpy()[index])

    def _tell(self, index: int, steps: int) -> None:
        place = tf.constant([index], tf.int64)
        value = tf.constant([steps + 1], tf.int64)
        self._steps.scatter_update(tf.IndexedSlices(value, place))
