# SPDX-License-Identifier: Apache-2.0
"""Powers of the number of examples are those by which ops scale when they run."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import powers, tables
from replicator.autodist.kinds import Kind
from tests.autodist.helpers import told

Make = Callable[[tf.Tensor], tf.Tensor]
OPERANDS = np.array([[0.5, 1.5, 2.0], [1.25, 0.75, 3.0], [2.5, 0.25, 1.0]])
EXPONENTS = (0, 1, -2)
PAIRS = (
    *sorted(tables.TIMES | tables.OVER),
    *tables.MULTIPLES,
    *tables.ALIKE,
    "Add",
    "Sub",
)
# Of how many operands.
TYPES = {
    **dict.fromkeys((*tables.HOMOGENEOUS, "Exp", "Tanh", "Log", "Floor"), 1),
    **dict.fromkeys((*PAIRS, "Pow", "Atan2", "FloorMod", "Xlogy", "NextAfter"), 2),
    **{"AddN": 2, "SelectV2": 3, "ClipByValue": 3},
}
_COMPLEX = ("ComplexAbs", "Real", "Imag", "Conj")


def _computed(type_: str, operands: list[np.ndarray]) -> np.ndarray:
    """Returns what an op computes."""
    raw = getattr(tf.raw_ops, type_)
    if type_ == "AddN":
        return raw(inputs=operands).numpy()
    if type_ in _COMPLEX:
        operands = [one * (1 + 2j) for one in operands]
    if type_ == "SelectV2":
        operands[0] = operands[0] > 1  # a number of examples or not
    return raw(
        **dict(zip(inspect.signature(raw).parameters, operands, strict=False))
    ).numpy()


@pytest.mark.parametrize("type_", TYPES)
def test_results_grow_by_the_power_that_is_told(type_: str) -> None:
    for exponents in itertools.product(EXPONENTS, repeat=TYPES[type_]):
        power = powers.power_of(type_, exponents)
        if power is not None and any(exponents):
            one, many = (
                _computed(
                    type_, [u * n**k for u, k in zip(OPERANDS, exponents, strict=False)]
                )
                for n in (1.0, 4.0)
            )
            expected = one if one.dtype == bool else one * 4.0**power
            np.testing.assert_allclose(many, expected, err_msg=str(exponents))


@pytest.mark.parametrize(
    ("type_", "exponents", "power"),
    [
        *[(type_, [1], factor) for type_, factor in tables.HOMOGENEOUS.items()],
        *[(type_, [2, 2], 2 * factor) for type_, factor in tables.ALIKE.items()],
        *[
            (type_, [0, 3] if operand else [3, 0], 3)
            for type_, operand in tables.MULTIPLES.items()
        ],
        *[(type_, [1, 0.5], 1.5) for type_ in sorted(tables.TIMES)],
        *[(type_, [1, 0.5], 0.5) for type_ in sorted(tables.OVER)],
        *[(type_, [1, 1], 1) for type_ in sorted(tables.ADDED)],
        *[("Select", [0, 2, 2], 2), ("SelectV2", [0, 2, 2], 2)],
        *[("Exp", [0], 0), ("Atan2", [0, 0], 0)],
        # Zeros are multiples of whatever it is.
        *[("Add", [None, 1], 1), ("SelectV2", [0, 1, None], 1), ("Mul", [None, 2], 2)],
    ],
)
def test_powers_are_told_of_the_ops_of_the_tables(
    type_: str, exponents: list[float | None], power: float
) -> None:
    assert powers.power_of(type_, exponents) == power


@pytest.mark.parametrize(
    ("type_", "exponents"),
    [
        *[("Exp", [1]), ("Tanh", [-1]), ("Pow", [1, 0])],
        *[("Add", [1, 0]), ("Maximum", [1, 2]), ("SquaredDifference", [0, 1])],
        *[("SelectV2", [1, 1, 1]), ("SelectV2", [0, 1, 0]), ("TanhGrad", [1, 0])],
    ],
)
def test_there_is_none_where_terms_differ_or_are_not_scaled(
    type_: str, exponents: list[float]
) -> None:
    assert powers.power_of(type_, exponents) is None


ZEROS: dict[str, tuple[Make, bool]] = {
    "zeros": (lambda x: tf.zeros([2, 3]), True),
    "zeros like others": (lambda x: tf.zeros_like(x), True),
    "filled": (lambda x: tf.fill(tf.shape(x), 0.0), True),
    "whole numbers": (lambda x: tf.constant([0, 0]), True),
    "some": (lambda x: tf.constant([0.0, 1.0]), False),
    "filled with ones": (lambda x: tf.fill(tf.shape(x), 1.0), False),
    "filled with examples": (lambda x: tf.fill(tf.shape(x), x[0, 0]), False),
    "texts": (lambda x: tf.constant(["0"]), False),
    "false": (lambda x: tf.constant([False]), False),
    "examples": (lambda x: x, False),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_are_told_without_running(name: str) -> None:
    make, expected = ZEROS[name]
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 3])
        assert powers.is_zero(make(x)) == expected


def _count(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.shape(x)[0], tf.float32)


def _ones(x: tf.Tensor) -> tf.Tensor:
    return tf.ones([tf.shape(x)[0]])


def _some(x: tf.Tensor) -> tf.Tensor:
    return tf.boolean_mask(x, x[:, 0] > -0.5)


VALUES: dict[str, tuple[Make, Kind, float]] = {
    # Rows, reduced.
    "a sum": (lambda x: tf.reduce_sum(x, 0), Kind.MEAN, 1),
    "a mean of sums": (lambda x: tf.reduce_mean(x * _count(x)), Kind.MEAN, 1),
    "ones added up": (lambda x: tf.reduce_sum(_ones(x)), Kind.SAME, 1),
    "the mean of ones": (lambda x: tf.reduce_mean(_ones(x) * 3), Kind.SAME, 0),
    "the largest of ones": (lambda x: tf.reduce_max(_ones(x)), Kind.SAME, 0),
    "the smallest": (lambda x: tf.reduce_min(x, 0), Kind.MIN, 0),
    "all": (lambda x: tf.reduce_all(x > -1.5, 0), Kind.MIN, 0),
    "any": (lambda x: tf.reduce_any(x > 1.0, 0), Kind.MAX, 0),
    "a product": (lambda x: tf.reduce_prod(x), Kind.UNKNOWN, 0),
    "the largest times n": (lambda x: tf.reduce_max(x * _count(x)), Kind.UNKNOWN, 0),
    "how many": (lambda x: tf.reduce_sum(tf.ones_like(_some(x))), Kind.MEAN, 1),
    "the largest of some": (lambda x: tf.reduce_max(_some(x)), Kind.UNKNOWN, 0),
    "a mean of some, times n": (
        lambda x: tf.reduce_mean(_some(x) * _count(x)),
        *(Kind.UNKNOWN, 0),
    ),
    # Extrema.
    "bounded above": (lambda x: tf.minimum(tf.reduce_max(x), 0.5), Kind.MAX, 0),
    "bounded below": (lambda x: tf.maximum(0.5, tf.reduce_min(x)), Kind.MIN, 0),
    "the largest of two": (
        lambda x: tf.maximum(tf.reduce_max(x), tf.reduce_max(-x)),
        *(Kind.MAX, 0),
    ),
    "the largest of all columns": (
        lambda x: tf.reduce_max(tf.reduce_max(x, 0)),
        *(Kind.MAX, 0),
    ),
    "the smallest of the largest": (
        lambda x: tf.reduce_min(tf.reduce_max(x, 0)),
        *(Kind.STATISTIC, 0),
    ),
    "the smaller of the largest": (
        lambda x: tf.minimum(tf.reduce_max(x), tf.reduce_max(-x)),
        *(Kind.STATISTIC, 0),
    ),
    # Comparisons with these.
    "one is larger": (lambda x: tf.reduce_max(x) > 1, Kind.MAX, 0),
    "all are larger": (lambda x: tf.reduce_min(x) > -1, Kind.MIN, 0),
    "all are smaller": (lambda x: tf.reduce_max(x) < 1, Kind.MIN, 0),
    "one is smaller": (lambda x: tf.reduce_min(x) <= -1, Kind.MAX, 0),
    "less than one": (lambda x: tf.less(1.0, tf.reduce_max(x)), Kind.MAX, 0),
    "more than all": (lambda x: tf.greater_equal(1.0, tf.reduce_max(x)), Kind.MIN, 0),
    "an extremum of another": (
        lambda x: tf.reduce_max(x) > tf.reduce_min(x) + 3,
        *(Kind.STATISTIC, 0),
    ),
    # Numbers of examples.
    "the larger number": (
        lambda x: tf.maximum(_count(x), 2 * _count(x)),
        *(Kind.SAME, 1),
    ),
    "at least one": (lambda x: tf.maximum(_count(x), 1.0), Kind.UNKNOWN, 0),
    "one or all": (
        lambda x: tf.where(tf.shape(x)[1] > 2, _count(x), 1.0),
        *(Kind.UNKNOWN, 0),
    ),
    "its exponential": (lambda x: tf.exp(-_count(x)), Kind.UNKNOWN, 0),
    "over its root": (lambda x: tf.math.rsqrt(_count(x)), Kind.SAME, -0.5),
    "the square of a whole number": (
        lambda x: tf.square(tf.shape(x)[0]),
        *(Kind.UNKNOWN, 0),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_told_of_values_is_true_of_parts(name: str) -> None:
    make, kind, power = VALUES[name]
    value = told(make)
    assert (value.kind, value.power) == (kind, power)
