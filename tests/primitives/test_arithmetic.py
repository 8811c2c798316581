# SPDX-License-Identifier: Apache-2.0
"""Sums are added in replica order, to the bit, whatever TensorFlow makes of a graph."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.primitives import arithmetic
from tests.helpers import opaque

v1 = tf.compat.v1
# Of these no two orders have the same sum.
COLUMN = [np.float32(x) for x in (1e8, 1.0, -1e8, 1e-3, 7.0)]


def _run(make: Any) -> Any:
    with tf.Graph().as_default(), v1.Session() as session:
        return session.run(make())


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 15, 16, 20])
@pytest.mark.parametrize("order", [1, -1])
def test_sums_are_added_from_left_to_right(order: int, count: int) -> None:
    """Constants among them or not."""
    column = (COLUMN * 4)[:count][::order]
    expected = functools.reduce(np.add, column)
    for add in (
        arithmetic.add_in_order,
        lambda tensors: arithmetic.fold(tf.add, tensors),
    ):
        for some in (1, 3):
            tensors = lambda some=some: [  # noqa: E731
                tf.constant(x) if k % some else opaque(x) for k, x in enumerate(column)
            ]
            assert _run(lambda add=add, made=tensors: add(made())) == expected


def test_folds_combine_what_came_before_with_the_next() -> None:
    found = arithmetic.fold(lambda a, b: 10 * a + b, [tf.constant(k) for k in range(5)])
    assert found.numpy() == 1234


@pytest.mark.parametrize("count", [1, 3, 17])
@pytest.mark.parametrize("inside", [False, True])
def test_a_sum_in_order_is_differentiated(count: int, inside: bool) -> None:
    """As map_reduce needs it, which sums on one replica what a tape has recorded."""

    @tf.function
    def function(xs: list[tf.Tensor]) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(xs)
            with tf.GradientTape() as tape:
                tape.watch(xs)
                column = [x * x for x in xs]
                total = arithmetic.add_in_order(column)
                if inside:
                    total = tf.cond(
                        total > 0.0,
                        lambda: arithmetic.add_in_order(column),
                        lambda: total,
                    )
            first = tape.gradient(total, xs)
        return total, first, outer.gradient(first, xs)

    xs = [tf.constant(1.0 + k) for k in range(count)]
    total, first, second = function(xs)
    assert float(total) == sum((1.0 + k) ** 2 for k in range(count))
    assert [float(d) for d in first] == [2.0 * (1.0 + k) for k in range(count)]
    assert [float(d) for d in second] == [2.0] * count


def test_the_shape_of_a_sum_is_all_that_is_known_of_its_operands() -> None:
    with tf.Graph().as_default():
        column = [v1.placeholder(tf.float32, shape) for shape in ([None, 3], [2, None])]
        assert arithmetic.add_in_order(column).shape.as_list() == [2, 3]
        first = column[0]
        total = arithmetic.add_in_order([first, v1.placeholder(tf.float32, None)])
        assert total.shape.as_list() == [None, 3]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 8])
def test_quotients_are_those_of_numpy_to_the_bit(count: int, dtype: str) -> None:
    totals = np.array([0, 1, 7, 22, -5, 1000], dtype)
    found = arithmetic.divide(tf.constant(totals), count).numpy()
    assert found.dtype == totals.dtype
    np.testing.assert_array_equal(
        found, (totals / np.array(count, dtype)).astype(dtype)
    )


def test_shapes_are_checked_unless_the_rank_is_unknown() -> None:
    x = tf.ones([2, 3])
    assert arithmetic.ensure_shape(x, [None, 3]).shape == [2, 3]
    np.testing.assert_array_equal(arithmetic.ensure_shape(x, None), x)
    with pytest.raises(tf.errors.InvalidArgumentError):
        arithmetic.ensure_shape(x, [2, 2])
