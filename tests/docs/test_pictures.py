# SPDX-License-Identifier: Apache-2.0
"""Pictures of communication show exactly what the communication moved."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from docs.helpers import pictures
from tests import helpers

A1, A2, B1, B2, C1, C2 = (
    (replica, place) for replica in range(3) for place in range(2)
)


def _cells(
    step_fn: Any, size: int = 2
) -> list[tuple[tuple[tuple[int, int], ...], ...]]:
    repl = helpers.make(3)
    ends = pictures.endings(repl, lambda x: step_fn(repl, x), size)
    return [end.cells for end in ends]


def test_a_sum_is_of_all() -> None:
    both = ((A1, B1, C1), (A2, B2, C2))
    assert _cells(lambda repl, x: repl.all_reduce(x)) == [both] * 3


def test_a_maximum_is_of_its_owner() -> None:
    assert _cells(lambda repl, x: repl.all_reduce(x, "max")) == [((C1,), (C2,))] * 3


def test_what_is_left_with_nothing_has_no_cells() -> None:
    actual = _cells(lambda repl, x: repl.reduce(x, root=1))
    assert actual == [(), ((A1, B1, C1), (A2, B2, C2)), ()]


def test_zeros_have_no_source() -> None:
    actual = _cells(lambda repl, x: repl.permute(x, [(0, 2)]))
    assert actual == [((), ()), ((), ()), ((A1,), (A2,))]


def test_rows_are_those_of_the_result() -> None:
    repl = helpers.make(3)
    ends = pictures.endings(repl, lambda x: repl.all_gather(x), 2)
    assert {(len(end.cells), end.columns) for end in ends} == {(6, 2)}


@pytest.mark.parametrize(
    ("step_fn", "arrows", "told"),
    [
        (lambda repl, x: repl.shift(x), 3, "replica 0: c1, c2; replica 1: a1, a2"),
        (lambda repl, x: repl.broadcast(x, root=1), 3, "replica 2: b1, b2"),
        (
            lambda repl, x: x if repl.replica_id else tf.zeros_like(x),
            2,
            "replica 0: 0, 0",
        ),
    ],
)
def test_a_picture_has_an_arrow_for_each_source(
    step_fn: Any, arrows: int, told: str
) -> None:
    repl = helpers.make(3)
    html = pictures.picture(repl, lambda x: step_fn(repl, x), size=2).data
    assert html.count("<path") == 2 * arrows  # a line, and its head
    assert told in html


def test_a_map_shows_who_worked_on_which_item() -> None:
    actual = _cells(
        lambda repl, x: tf.stack(repl.map_gather(lambda k: x[k], [0, 1])),
    )
    assert actual == [((A1,), (B2,))] * 3
