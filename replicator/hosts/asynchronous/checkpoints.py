# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of programs that share variables; the first program writes them."""

from __future__ import annotations

import math

import tensorflow as tf

from replicator.cluster.saving import Alone
from replicator.hosts.asynchronous import board as boards
from replicator.hosts.asynchronous.membership import Member


class Shared:
    """The checkpoints of all programs, in a directory of the first.

    The first program restores the newest checkpoint, once in the life of the servers. A
    program that restarts while others go on uses the current variables, and resumes
    from the step at which it last called `save`.

    Args:
        member: This program.
        number: The number of these checkpoints among those of the program.
        first: Reads and writes the checkpoints, in the first program.
        done: The variable with the number of steps done.
    """

    def __init__(
        self, member: Member, number: int, first: Alone, done: tf.Variable
    ) -> None:
        own, count = member.board.own, member.board.count
        self._own, self._begun, self._first = own, count, first
        self._done = done
        # The steps done by each program, and last those restored; each plus one, as 0
        # stands for none.
        self._steps = member.store.table(f"checkpoints/{number}", count + 1)

    @property
    def latest(self) -> str | None:
        """The path of the newest checkpoint on the first host; None elsewhere."""
        return self._first.latest if self._own == 0 else None

    def restore(self) -> None:
        """Restores the newest checkpoint, unless that was done; waits until it is."""
        if self._own == 0 and not self._known(self._begun):
            self._first.restore()
            self._tell(self._begun, int(self._done))
        boards.wait(lambda: self._known(self._begun) > 0, math.inf)
        self._done.assign(self._known(self._own) or self._known(self._begun))
        self._done.assign_sub(1)

    def save(self, number: int) -> str:
        """Records this program's steps; the first program also writes a checkpoint."""
        path = self._first.save(number) if self._own == 0 else ""
        self._tell(self._own, number)
        return path

    def _known(self, index: int) -> int:
        return int(self._steps.numpy()[index])

    def _tell(self, index: int, steps: int) -> None:
        indices = tf.constant([index], tf.int64)
        value = tf.constant([steps + 1], tf.int64)
        self._steps.scatter_update(tf.IndexedSlices(value, indices))
