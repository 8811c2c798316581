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

from replicator import context, strategy
from replicator._tf import ops
from replicator.graph.ir.placeholder import NO_POLICY
from replicator.primitives import sparse
from replicator.world import World
from tests import helpers

v1 = tf.compat.v1


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


class _Clipped(v1.train.GradientDescentOptimizer):
    """Clips by the global norm: every replica uses the sums of all variables."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        gradients, variables = zip(*grads_and_vars, strict=True)
        clipped, _ = tf.clip_by_global_norm(list(gradients), 0.5)
        pairs = zip(clipped, variables, strict=True)
        return super().apply_gradients(list(pairs), *args, **kwargs)


@pytest.mark.parametrize(
    "options",
    [{"variables": "mirrored"}, {"strategy": strategy.Parallax()}],
    ids=["mirrored", "some have an owner"],
)
def test_components_stay_equal_where_sums_have_any_order(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "in_any_order", lambda group: True)
    with tf.Graph().as_default() as graph:
        repl = helpers.make(3, **options)
        with repl.context():
            rows = tf.Variable(tf.ones([6, 4]), name="rows")
            dense = tf.Variable(tf.ones([4, 2]), name="dense")
        optimizer = repl.wrap_optimizer(_Clipped(0.5))

        def step_fn() -> tf.Tensor:
            indices = tf.constant([0, 1, 1, 3]) + repl.replica_id
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(
                    (tf.nn.embedding_lookup(rows, indices) @ dense) ** 2
                )
            gradients = tape.gradient(loss, [rows, dense])
            pairs = zip(gradients, [rows, dense], strict=True)
            with tf.control_dependencies([optimizer.apply_gradients(pairs)]):
                return tf.identity(loss)

        fetches = repl.run(step_fn)
        _deviate(graph)
        with helpers.session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(3):
                session.run(list(fetches))
            for variable in (rows, dense):
                first, *others = session.run(list(variable.components))
                for other in others:
                    np.testing.assert_array_equal(first, other)


def _deviate(graph: tf.Graph) -> None:
    """Scales each device's sums of rows, after all is built and taken as equal."""
    sums = [op for op in graph.get_operations() if op.type == "UnsortedSegmentSum"]
    assert len(sums) >= 3
    for op in sums:
        (total,) = op.outputs
        places = [(c, list(c.inputs).index(total)) for c in total.consumers()]
        index = tf.DeviceSpec.from_string(op.device).device_index
        with tf.device(op.device):
            other = total * (1.0 + 1e-4 * index)
        for consumer, place in places:
            ops.set_input(consumer, place, other)


def test_accelerators_sum_in_any_order() -> None:
    def found(*names: str) -> list[bool]:
        world = World.single_process(names)
        build = types.SimpleNamespace(world=world)
        with mock.patch.object(context, "require") as require:
            require.return_value = types.SimpleNamespace(build=build)
            return [sparse.in_any_order((r,)) for r in range(len(names))]

    host = "/job:localhost/replica:0/task:0/device:"
    assert found(f"{host}CPU:0", f"{host}GPU:1") == [False, True]
