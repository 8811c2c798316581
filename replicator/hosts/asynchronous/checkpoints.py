# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of programs that share variables; the first program writes them."""

from __future__ import annotations

import math

import tensorflow as tf

from replicator.cluster.saving import LocalFiles
from replicator.hosts.asynchronous import board as boards
from replicator.hosts.asynchronous.membership import Member


class AsynchronousFiles:
    """The checkpoints of all programs, in a directory of the first.

    The first program restores the newest checkpoint, once in the life of the servers. A
    program that restarts while others go on uses the current variables, and resumes
    from the step at which it last called `save`.

    Args:
        member: This program.
        number: The number of these checkpoints among those of the program.
        first: Reads and writes the checkpoints, in the first program.
        step: The variable with the number of steps done.
    """

    def __init__(
        self, member: Member, number: int, first: LocalFiles, step: tf.Variable
    ) -> None:
        program, count = member.board.program, member.board.count
        self._program, self._start, self._first = program, count, first
        self._step = step
        # The steps done by each program, and last those restored; each plus one, as 0
        # stands for none.
        self._steps = member.store.table(f"checkpoints/{number}", count + 1)

    @property
    def latest(self) -> str | None:
        """The path of the newest checkpoint on the first host; None elsewhere."""
        return self._first.latest if self._program == 0 else None

    def restore(self) -> None:
        """Restores the newest checkpoint, unless that was done; waits until it is."""
        if self._program == 0 and not self._recorded(self._start):
            self._first.restore()
            self._record(self._start, int(self._step))
        boards.wait(lambda: self._recorded(self._start) > 0, math.inf)
        self._step.assign(self._recorded(self._program) or self._recorded(self._start))
        self._step.assign_sub(1)

    def save(self, number: int) -> str:
        """Records this program's steps; the first program also writes a checkpoint."""
        path = self._first.save(number) if self._program == 0 else ""
        self._record(self._program, number)
        return path

    def _recorded(self, index: int) -> int:
        return int(self._steps.numpy()[index])

    def _record(self, index: int, steps: int) -> None:
        indices = tf.constant([index], tf.int64)
        value = tf.constant([steps + 1], tf.int64)
        self._steps.scatter_update(tf.IndexedSlices(value, indices))
