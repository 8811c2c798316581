# SPDX-License-Identifier: Apache-2.0
"""A board holds what each program writes in its columns, and outlives all of them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from replicator.hosts.asynchronous import board as boards
from replicator.hosts.asynchronous.board import LOST, PRESENT, STATES, STEPS, Board


@pytest.fixture
def pair(names_of_its_own: None) -> list[Board]:
    """The board as two programs see it."""
    return [Board(n, 2, "CPU:0") for n in range(2)]


def test_a_board_is_written_by_columns(pair: list[Board]) -> None:
    pair[0].create()
    assert (pair[1].read() == boards.ABSENT).all(), "what a new table holds"
    pair[1].write(STATES, PRESENT)
    pair[0].write(STEPS, 5)
    pair[1].write(STEPS, 7)
    pair[1].write(STATES, LOST, 0)
    for board in pair:
        assert board.read()[STEPS].tolist() == [5, 7]
        assert board.read()[STATES].tolist() == [LOST, PRESENT]


def test_a_board_is_a_table(names_of_its_own: None) -> None:
    """Any sequence of reads and writes, compared with an array."""
    random, count = np.random.RandomState(0), 4
    programs = [Board(n, count, "CPU:0") for n in range(count)]
    programs[0].create()
    expected = np.zeros([3, count], np.int64)
    for _ in range(50):
        program, row, column = random.randint([count, 3, count])
        value = random.randint(-9, 9)
        whose = None if random.rand() < 0.5 else column
        programs[program].write(row, value, whose)
        expected[row, program if whose is None else whose] = value
        np.testing.assert_array_equal(programs[column].read(), expected)


def test_a_program_that_is_started_again_finds_what_was_written(
    pair: list[Board],
) -> None:
    assert not pair[0].exists() and not pair[1].exists()
    pair[0].create()
    assert pair[1].exists()
    pair[1].write(STEPS, 3)
    again = Board(0, 2, "CPU:0")
    again.create()
    assert again.read()[STEPS].tolist() == [0, 3]


def test_waiting_ends_at_its_limit() -> None:
    assert boards.wait(lambda: True, 0.0)
    began = time.monotonic()
    assert not boards.wait(lambda: False, 0.01)
    assert time.monotonic() - began >= 0.01


def test_waiting_ends_once_it_is_so() -> None:
    answers = iter([False, False, True])
    assert boards.wait(lambda: next(answers), 60.0)
    assert list(answers) == [], "it is asked no more often than it has to be"
