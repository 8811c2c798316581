# SPDX-License-Identifier: Apache-2.0
"""What the programs of asynchronous mode tell one another: a variable on a server.

Each writes its own columns, and reads all. Nobody waits in TensorFlow's runtime for
anybody, so that a program that dies holds up nobody else's calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from replicator import _tf

STEPS, BEATS, STATES = range(3)  # the rows: steps done, signs of life, one of these:
ABSENT, PRESENT, ENDED, LOST = range(4)
_PAUSES = (0.001, 0.05)  # seconds between two looks, at first and at most


class Board:
    """A table of numbers, [3, count], that all programs see.

    Args:
        own: Which program this is.
        count: How many there are.
        device: Where the table is.

    Attributes:
        own: That.
        count: That.
    """

    def __init__(self, own: int, count: int, device: str) -> None:
        self.own, self.count = own, count
        self._table = _tf.shared_variable(
            "replicator/board", tf.int64, [3 * count], device
        )

    def create(self) -> None:
        """Creates the table, unless it is there: this program may be started again."""
        if not self.exists():
            self._table.assign(np.zeros([3 * self.count], np.int64))

    def exists(self) -> bool:
        """Whether the table was created."""
        return bool(_tf.is_initialized(self._table))

    def read(self) -> np.ndarray:
        """Returns the table, [3, count]."""
        return self._table.numpy().reshape(3, self.count)

    def write(self, row: int, value: int, column: int | None = None) -> None:
        """Writes one number.

        Args:
            row: One of STEPS, BEATS, STATES.
            value: The number.
            column: Of which program; of this one, unless given.
        """
        column = self.own if column is None else column
        place = tf.constant([row * self.count + column], tf.int64)
        self._table.scatter_update(
            tf.IndexedSlices(tf.constant([value], tf.int64), place)
        )


def wait(until: Callable[[], bool], limit: float) -> bool:
    """Looks again and again, less and less often, whether something is so.

    Args:
        until: Whether it is.
        limit: After how many seconds to give up.

    Returns:
        Whether it came to be so.
    """
    pause, most = _PAUSES
    end = time.monotonic() + limit
    while not until():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, most)
    return True
