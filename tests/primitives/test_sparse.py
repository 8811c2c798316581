# SPDX-License-Identifier: Apache-2.0
"""Rows of equal index are summed, once, in their order."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from replicator import context
from replicator.graph.ir.placeholder import NO_POLICY
from replicator.primitives import sparse
from replicator.world import World
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


@pytest.mark.parametrize("mode", helpers.MODES)
def test_where_sums_have_any_order_all_have_those_of_the_first(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs: here, each replica's sum of the same rows has an error of its own."""
    plain = tf.math.unsorted_segment_sum
    repl = helpers.make(3)

    def differing(*args: Any) -> tf.Tensor:
        return plain(*args) + 1e-6 * repl.replica_id

    monkeypatch.setattr(sparse, "in_any_order", lambda group: True)
    monkeypatch.setattr(tf.math, "unsorted_segment_sum", differing)

    def step_fn() -> Any:
        rows = tf.fill([2, 1], helpers.opaque(repl.replica_id + 1.0))
        with tf.GradientTape() as tape:
            tape.watch(rows)
            slices = tf.IndexedSlices(rows, tf.constant([1, 2]), tf.constant([3, 1]))
            total = repl.all_reduce(slices)
            loss = tf.reduce_sum(total.values) * float(repl.replica_id + 1)
        return total.values, tape.gradient(loss, rows)

    totals, gradients = helpers.run(mode, repl, lambda: step_fn)
    for total, gradient in zip(totals, gradients, strict=True):
        np.testing.assert_array_equal(total, [[6.0], [6.0]])
        np.testing.assert_allclose(gradient, [[6.0], [6.0]], rtol=1e-6)


def test_accelerators_sum_in_any_order() -> None:
    def found(*names: str) -> list[bool]:
        world = World.all_here(names)
        build = types.SimpleNamespace(world=world)
        with mock.patch.object(context, "require") as require:
            require.return_value = types.SimpleNamespace(build=build)
            return [sparse.in_any_order((r,)) for r in range(len(names))]

    host = "/job:localhost/replica:0/task:0/device:"
    assert found(f"{host}CPU:0", f"{host}GPU:1") == [False, True]
