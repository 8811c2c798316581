# SPDX-License-Identifier: Apache-2.0
"""The layouts of the replicas' gradients, and the combined one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from replicator.optimizers.sparsity import GradientLayout, as_layout, merge_all

DENSE, INT32, INT64 = GradientLayout(), GradientLayout("int32"), GradientLayout("int64")
LAYOUTS = (None, DENSE, INT32, INT64)
VARIABLE = tf.Variable(tf.zeros([3, 2]))


def _rows(dtype: str = "int32", shape: bool = True) -> tf.IndexedSlices:
    return tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        tf.constant([2, 0, 2], dtype),
        tf.constant([3, 2]) if shape else None,
    )


def test_a_gradient_says_its_layout() -> None:
    assert GradientLayout.of(None) is None
    assert GradientLayout.of(tf.zeros([3, 2])) == DENSE
    assert GradientLayout.of(_rows("int32")) == INT32
    assert GradientLayout.of(_rows("int64")) == INT64


def test_merging_does_not_depend_on_the_order_of_the_replicas() -> None:
    for one, two, three in itertools.product(LAYOUTS, repeat=3):
        (both,) = merge_all([one], [two])
        assert merge_all([two], [one]) == (both,)
        assert merge_all([both], [three]) == merge_all([one], merge_all([two], [three]))
        assert merge_all([one], [one]) == (one,)


@pytest.mark.parametrize(
    ("one", "two", "both"),
    [
        (None, None, None),
        (None, INT32, INT32),
        (DENSE, None, DENSE),
        (DENSE, INT32, DENSE),
        (INT32, INT64, DENSE),
    ],
)
def test_what_two_replicas_can_both_make(
    one: GradientLayout | None, two: GradientLayout | None, both: GradientLayout | None
) -> None:
    assert merge_all([one], [two]) == (both,)


@pytest.mark.parametrize("layout", [DENSE, INT32, INT64], ids=str)
def test_no_gradient_counts_as_zeros(layout: GradientLayout) -> None:
    converted = as_layout(None, VARIABLE, layout)
    assert GradientLayout.of(converted) == layout
    np.testing.assert_array_equal(tf.convert_to_tensor(converted), np.zeros([3, 2]))


@pytest.mark.parametrize("shape", [True, False])
def test_rows_that_become_dense_are_added_up(shape: bool) -> None:
    converted = as_layout(_rows(shape=shape), VARIABLE, DENSE)
    assert GradientLayout.of(converted) == DENSE
    np.testing.assert_array_equal(converted, [[3, 4], [0, 0], [6, 8]])


def test_what_has_the_layout_is_left_alone() -> None:
    rows, dense = _rows(), tf.ones([3, 2])
    assert as_layout(rows, VARIABLE, INT32) is rows
    assert as_layout(dense, VARIABLE, DENSE) is dense
    assert as_layout(None, VARIABLE, None) is None


def test_of_a_variable_without_a_static_shape() -> None:
    variable = tf.Variable(tf.zeros([0, 2]), shape=[None, 2])
    variable.assign(tf.zeros([4, 2]))
    converted = as_layout(None, variable, INT32)
    assert tf.convert_to_tensor(converted).shape == [4, 2]
