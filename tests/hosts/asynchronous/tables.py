# SPDX-License-Identifier: Apache-2.0
"""A board that programs of one process share, for the tests of this folder."""

from __future__ import annotations

import numpy as np

from replicator.hosts.asynchronous.board import PRESENT, STATES


class Table:
    """A board within one process."""

    def __init__(self, count: int) -> None:
        self.numbers = np.zeros([3, count], np.int64)
        self.numbers[STATES] = PRESENT

    def seen_by(self, own: int) -> Seen:
        return Seen(self.numbers, own)


class Seen:
    """The board as one of the programs sees it."""

    def __init__(self, numbers: np.ndarray, own: int) -> None:
        self._numbers, self.program, self.count = numbers, own, numbers.shape[1]

    def read(self) -> np.ndarray:
        return self._numbers.copy()

    def write(self, row: int, value: int, column: int | None = None) -> None:
        self._numbers[row, self.program if column is None else column] = value
