# SPDX-License-Identifier: Apache-2.0
"""Rows of equal index are summed, once, in their order."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from replicator.graph.ir.placeholder import NO_POLICY
from replicator.primitives import sparse
from tests import helpers


@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64])
@given(indices=st.lists(st.integers(0, 5), max_size=8), count=st.integers(1, 3))
def test_the_sums_are_those_of_the_dense_rows(
    dtype: tf.DType, indices: list[int], count: int
) -> None:
    values = np.arange(2 * len(indices), dtype=np.float64).reshape(-1, 2) - 3
    slices = tf.IndexedSlices(
        tf.constant(values, dtype, [len(indices), 2]),
        tf.constant(indices, tf.int64, [len(indices)]),
        tf.constant([6, 2], tf.int64),
    )
    added = sparse.add_up(slices, count)
    assert list(added.indices.numpy()) == list(dict.fromkeys(indices))
    assert added.values.dtype == dtype
    dense = np.zeros([6, 2])
    np.add.at(dense, np.array(indices, int), values)
    expected = (dense / count)[list(dict.fromkeys(indices))]
    tolerance = 1e-3 if dtype == tf.float16 else 1e-6
    np.testing.assert_allclose(added.values, expected, rtol=tolerance)


def test_all_replicas_have_the_same_rows_in_replica_order() -> None:
    repl = helpers.make(3)

    def step_fn() -> tuple[tf.Tensor, tf.Tensor]:
        r = repl.replica_id
        slices = tf.IndexedSlices(
            tf.fill([2, 1], r + 1.0), tf.constant([2 - r, 9]), tf.constant([10, 1])
        )
        reduced = sparse.reduce(slices, "mean", (0, 1, 2), NO_POLICY)
        return reduced.values, reduced.indices

    values, indices = repl.run(step_fn)
    for own_values, own_indices in zip(values, indices, strict=True):
        np.testing.assert_array_equal(own_indices, [2, 9, 1, 0])
        np.testing.assert_allclose(own_values[:, 0], [1 / 3, 2, 2 / 3, 1], rtol=1e-6)
