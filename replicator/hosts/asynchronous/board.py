# SPDX-License-Identifier: Apache-2.0
"""A shared table through which the programs of asynchronous mode communicate.

The table is a variable on a server; each program writes its own column and reads all.
No program waits for another inside TensorFlow's runtime, so a program that dies does
not block the calls of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from replicator._tf import variables

STEPS, BEATS, STATES = range(3)  # the rows: steps done, heartbeats, states
ABSENT, PRESENT, ENDED, LOST = range(4)  # the states
_PAUSES = (0.001, 0.05)  # seconds between two polls, at first and at most


class Board:
    """An int64 table, [3, count], that all programs share.

    Args:
        program: The number of this program.
        count: The number of programs.
        device: The device of the table.

    Attributes:
        program: The number of this program.
        count: The number of programs.
    """

    def __init__(self, program: int, count: int, device: str) -> None:
        self.program, self.count = program, count
        self._table = variables.shared_variable(
            "replicator/board", tf.int64, [3 * count], device
        )

    def create(self) -> None:
        """Creates the table unless it exists, as after a restart of this program."""
        if not self.exists():
            self._table.assign(np.zeros([3 * self.count], np.int64))

    def exists(self) -> bool:
        """Whether the table has been created."""
        return bool(variables.is_initialized(self._table))

    def read(self) -> np.ndarray:
        """Returns the table, [3, count]."""
        return self._table.numpy().reshape(3, self.count)

    def write(self, row: int, value: int, column: int | None = None) -> None:
        """Writes one number.

        Args:
            row: One of STEPS, BEATS, STATES.
            value: The number.
            column: The program's number; this program's by default.
        """
        column = self.program if column is None else column
        index = tf.constant([row * self.count + column], tf.int64)
        self._table.scatter_update(
            tf.IndexedSlices(tf.constant([value], tf.int64), index)
        )


def wait(until: Callable[[], bool], limit: float) -> bool:
    """Polls a condition, with growing pauses, until it holds.

    Args:
        until: The condition.
        limit: The number of seconds after which to give up.

    Returns:
        Whether the condition holds.
    """
    pause, longest = _PAUSES
    deadline = time.monotonic() + limit
    while not until():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True
