# SPDX-License-Identifier: Apache-2.0
"""What kinds are combined to is what numbers of these kinds are combined to."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import kinds
from replicator.autodist.kinds import (
    DRAWN,
    MIXED,
    SAME,
    STATISTIC,
    UNKNOWN,
    Kind,
    Value,
)
from replicator.autodist.wholes import Whole
from tests.autodist.helpers import PARTS, check_told

MEAN, SUM, MAX, MIN = (
    Value(Kind.MEAN),
    Value(Kind.MEAN, 1),
    Value(Kind.MAX),
    Value(Kind.MIN),
)
COUNT = Value(Kind.SAME, 1, by_value=False)
RATIO = Value(Kind.RATIO, 1)
DATA = np.random.default_rng(2).uniform(0.5, 2.0, [2, sum(PARTS), 4])
_NUMBERS: dict[Kind, Callable[[np.ndarray], Any]] = {
    Kind.SAME: lambda data: np.arange(1.0, 5.0),
    Kind.MEAN: lambda data: np.mean(data, 0),
    Kind.MAX: lambda data: np.max(data, 0),
    Kind.MIN: lambda data: np.min(data, 0),
    Kind.STATISTIC: lambda data: np.std(data, 0),
    Kind.MIXED: lambda data: np.sum(data, 0) + 1,
}
# Of these it is known what numbers they are; the others are random, or unknown.
VALUES = [
    *[Value(kind) for kind in _NUMBERS],
    *[Value(kind, p) for kind in (Kind.SAME, Kind.MEAN) for p in (1, -2, 0.5)],
]


def _numbers(value: Value, own: int) -> list[np.ndarray]:
    """Returns a number of each part, and of the whole, that is of a kind."""
    ends = np.cumsum(PARTS)
    return [
        _NUMBERS[value.kind](data) * len(data) ** value.power
        for data in (*np.split(DATA[own], ends[:-1]), DATA[own])
    ]


_BINARY: dict[str, tuple[Callable[..., Value], Callable[..., Any]]] = {
    "added": (lambda one, two: kinds.added([one, two]), operator.add),
    "less": (lambda one, two: kinds.added([one, kinds.negated(two)]), operator.sub),
    "multiplied": (kinds.multiplied, operator.mul),
    "divided": (kinds.divided, operator.truediv),
    "chosen, the first": (kinds.joined, lambda one, two: one),
    "chosen, the second": (kinds.joined, lambda one, two: two),
    "together": (
        lambda one, two: kinds.together([one, two]),
        lambda one, two: np.concatenate([one, two]),
    ),
    "computed": (
        lambda one, two: kinds.computed([one, two]),
        lambda one, two: np.exp(one * two / 100) + one,
    ),
}


@pytest.mark.parametrize("name", _BINARY)
def test_what_is_told_of_two_is_true_of_numbers(name: str) -> None:
    combine, compute = _BINARY[name]
    for one, two in itertools.product(VALUES, repeat=2):
        value = combine(one, two)
        if value.kind in (Kind.SAME, Kind.MEAN, Kind.MAX, Kind.MIN):
            numbers = zip(_numbers(one, 0), _numbers(two, 1), strict=True)
            *own, whole = (compute(*pair) for pair in numbers)
            check_told(value, whole, own, PARTS)


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{v.kind.name} {v.power}")
def test_what_is_told_of_one_is_true_of_numbers(value: Value) -> None:
    *own, whole = _numbers(value, 0)
    for power in (0, 1, -0.5):
        scaled = kinds.scaled(value, power)
        if scaled.kind in (Kind.SAME, Kind.MEAN, Kind.MAX, Kind.MIN):
            counts = np.array([*PARTS, sum(PARTS)], float) ** power
            parts = [n * one for n, one in zip(counts[:-1], own, strict=True)]
            check_told(scaled, counts[-1] * whole, parts, PARTS)
    if value.kind in (Kind.SAME, Kind.MEAN, Kind.MAX, Kind.MIN):
        check_told(kinds.negated(value), -whole, [-one for one in own], PARTS)
    if kinds.is_same(value):
        np.testing.assert_array_equal(own, [whole] * len(own))
    if kinds.is_level(value):  # twice the examples change nothing
        twice = _NUMBERS[value.kind](np.concatenate([DATA[0]] * 2))
        np.testing.assert_allclose(whole, twice)


with tf.Graph().as_default():
    _OVER = [tf.constant([1.0]), tf.constant([2.0])]
_SOME, _OTHERS = (RATIO.replaced(over=over) for over in _OVER)
TOLD: list[tuple[Value, Value]] = [
    # Sums.
    (kinds.added([]), SAME),
    (kinds.added([MEAN, SAME]), MEAN),
    (kinds.added([COUNT, SUM]), SUM),
    (kinds.added([COUNT, COUNT]), COUNT),
    (kinds.added([MEAN, SUM]), MIXED),
    (kinds.added([SAME, COUNT]), UNKNOWN),
    (kinds.added([MIXED, SUM]), MIXED),
    (kinds.added([MAX, SAME]), MAX),
    (kinds.added([MAX, COUNT]), UNKNOWN),
    (kinds.added([MAX, MEAN]), STATISTIC),
    (kinds.added([_SOME, SAME]), _SOME),
    (kinds.added([_SOME, _SOME]), _SOME),
    (kinds.added([_SOME, _OTHERS]), STATISTIC),
    (kinds.added([_SOME.replaced(power=2), SAME]), MIXED),
    (kinds.added([DRAWN, SAME]), DRAWN),
    (kinds.added([DRAWN, MEAN]), MEAN),
    (kinds.added([DRAWN, SUM]), MIXED),
    (kinds.added([DRAWN, COUNT]), UNKNOWN),
    # Products and quotients.
    (kinds.multiplied(COUNT, MEAN), SUM),
    (kinds.multiplied(_SOME, COUNT), _SOME.replaced(power=2)),
    (kinds.multiplied(MEAN, MEAN), STATISTIC),
    (kinds.multiplied(SUM, MEAN), UNKNOWN),
    (kinds.multiplied(SAME, MAX), STATISTIC),  # by what may be negative
    (kinds.multiplied(DRAWN, SAME), DRAWN),
    (kinds.multiplied(DRAWN, COUNT), UNKNOWN),
    (kinds.divided(SUM, COUNT), MEAN),
    (kinds.divided(SAME, COUNT), COUNT.replaced(power=-1)),
    (kinds.divided(SAME, MEAN), STATISTIC),
    # Others.
    (kinds.negated(MAX), MIN),
    (kinds.negated(MIN), MAX),
    (kinds.scaled(_SOME, 1), _SOME.replaced(power=2)),
    (kinds.scaled(MAX, 1), UNKNOWN),
    (kinds.joined(MAX, MAX), MAX),
    (kinds.joined(MEAN, SAME), MEAN),
    (kinds.joined(SUM, COUNT), SUM),
    (kinds.joined(SUM, SAME), UNKNOWN),
    (kinds.joined(MAX, SAME), UNKNOWN),
    (
        kinds.joined(Value(Kind.ROWS), Value(Kind.ROWS, by_value=False)),
        Value(Kind.ROWS),
    ),
    (kinds.joined(Value(Kind.ROWS), Value(Kind.ROWS, axis=1)), UNKNOWN),
    (kinds.together([MEAN, SAME, MEAN]), MEAN),
    (kinds.together([MEAN, MAX]), STATISTIC),
    (kinds.together([MEAN, SUM]), UNKNOWN),
    (kinds.together([_SOME, _SOME]), UNKNOWN),
    (kinds.computed([MEAN, MAX, DRAWN]), STATISTIC),
    (kinds.computed([_SOME]), STATISTIC),
    (kinds.computed([_SOME.replaced(power=0)]), UNKNOWN),
]


@pytest.mark.parametrize("n", range(len(TOLD)))
def test_as_much_is_told_as_can_be(n: int) -> None:
    found, expected = TOLD[n]
    assert found.replaced(by_value=True) == expected.replaced(by_value=True)


def test_whole_numbers_that_are_rounded_are_none_of_the_batch() -> None:
    with tf.Graph().as_default():
        rounded, exact = tf.cast(0.5, tf.int32).op, tf.cast(1, tf.float32).op
    assert kinds.cast(exact, SUM) == SUM
    assert kinds.cast(rounded, MAX) == MAX
    assert kinds.cast(rounded, MEAN) == STATISTIC
    assert kinds.cast(rounded, SUM) == UNKNOWN


def test_what_a_value_was_made_of_stays_with_it() -> None:
    with tf.Graph().as_default():
        ops = [tf.no_op(), tf.no_op()]
    one, two = (Whole(op, 0) for op in ops)
    values = [
        MEAN.replaced(wholes=frozenset([one])),
        MEAN.replaced(mixed=ops[0], wholes=frozenset([two])),
        MEAN.replaced(mixed=ops[1]),
    ]
    made = kinds.made_of(SUM, values)
    assert (made.mixed, made.wholes) == (ops[0], {one, two})
    assert kinds.made_of(SUM.replaced(mixed=ops[1]), values).mixed is ops[1]
    assert kinds.alone([made]) == [SUM]
    joined = kinds.joined(values[0], values[1])
    assert (joined.kind, joined.mixed, joined.wholes) == (Kind.MEAN, ops[0], {one, two})
    assert not kinds.is_same(SAME.replaced(wholes=frozenset([one])))


def test_gradients_are_scaled_from_the_start_as_their_loss_is_a_mean_or_a_sum() -> None:
    assert kinds.of_start(SUM, SAME) is None
    assert kinds.of_start(MEAN, SAME) == COUNT
    assert kinds.of_start(MEAN, SUM).power == 2
    assert kinds.of_start(_SOME, SAME) == UNKNOWN


def test_sums_and_counts_are_told_in_words() -> None:
    assert SUM.said == "a sum over the examples"
    assert COUNT.said == "a number of examples"
    assert MEAN.said == "a mean over the examples"
