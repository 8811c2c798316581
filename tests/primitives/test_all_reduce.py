# SPDX-License-Identifier: Apache-2.0
"""all_reduce: sparse tensors, gradients at special points, and one that waits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.graph.ir import placeholder
from replicator.primitives import all_reduce, base
from tests import helpers

FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]


# --- Sparse -------------------------------------------------------------------


def _slices(r: int, dtype: str = "float64") -> tf.IndexedSlices:
    """Rows that repeat in a replica and between replicas; none on replica 2."""
    indices = [[0, 2, 0], [2], []][r]
    rows = np.random.RandomState(r).randn(len(indices), 2)
    return tf.IndexedSlices(
        helpers.opaque(rows.astype(tf.as_dtype(dtype).as_numpy_dtype), [None, 2]),
        tf.constant(indices, tf.int32),
        tf.constant([4, 2]),
    )


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize(
    ("op", "weighted"), [("sum", False), ("mean", False), ("mean", True)]
)
def test_slices_stay_sparse(op: str, weighted: bool, mode: str) -> None:
    repl = helpers.make(3)
    sizes = []

    def step(sparse: bool) -> tf.Tensor:
        x: Any = _slices(repl.replica_id)
        weight = [2.0, 0.5, 1.0][repl.replica_id] if weighted else None
        if not sparse:
            x = tf.convert_to_tensor(x)
        y = repl.all_reduce([x, tf.constant(1.0)], op, weight=weight)[0]
        if sparse:
            assert isinstance(y, tf.IndexedSlices)
            sizes.append(y)
        return tf.convert_to_tensor(y)

    got = helpers.run(mode, repl, lambda: lambda: step(True))
    want = helpers.run(mode, repl, lambda: lambda: step(False))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-14)
    assert all(one.tobytes() == got[0].tobytes() for one in got)
    assert sizes[0].values.shape.as_list() == [None, 2]


def test_slices_of_16_bits_keep_their_dtype_under_a_weight() -> None:
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        y = repl.all_reduce(_slices(repl.replica_id, "float16"), "mean", weight=70_000)
        assert y.dtype == tf.float16
        return tf.convert_to_tensor(y)

    assert np.isfinite(repl.run(step)[0].numpy()).all()


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_slices_can_be_differentiated(op: str) -> None:
    repl = helpers.make(3)

    def step(sparse: bool) -> tf.Tensor:
        slices = _slices(repl.replica_id)
        with tf.GradientTape() as tape:
            tape.watch(slices.values)
            x = slices if sparse else tf.convert_to_tensor(slices)
            y = tf.convert_to_tensor(repl.all_reduce(x, op))
            loss = (repl.replica_id + 1.0) * tf.reduce_sum(y**2)
        return tape.gradient(loss, slices.values)

    got = repl.run(functools.partial(step, True))
    want = repl.run(functools.partial(step, False))
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-14)


def test_slices_on_one_replica_only_do_not_pair() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x: Any = _slices(0)
        if repl.replica_id:
            x = tf.convert_to_tensor(x)
        return tf.convert_to_tensor(repl.all_reduce(x))

    with pytest.raises(
        replicator.MismatchError, match=r"(?s)all_gather.*float64\[\?, 2\].*all_reduce"
    ):
        repl.run(step)


# --- Gradients at special points ----------------------------------------------


def _gradient(values: Any, op: str, dtype: str = "float64") -> list[Any]:
    """The gradient of the sum over replicas r of (r + 1) * sum(all_reduce)."""
    repl = helpers.make(len(values))

    def step() -> tf.Tensor:
        r = repl.replica_id
        x = helpers.opaque(tf.constant(values[r], dtype))
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.cast(r + 1, dtype) * tf.reduce_sum(repl.all_reduce(x, op))
        return tape.gradient(loss, x)

    return [d.numpy().tolist() for d in repl.run(step)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("op", "sign"), [("max", 1.0), ("min", -1.0)])
def test_ties_share_equally(op: str, sign: float, dtype: str) -> None:
    values = sign * np.array([[1.0, 5.0, 2.0], [4.0, 5.0, 2.0], [4.0, 0.0, 2.0]])
    assert _gradient(values, op, dtype) == [[0, 3, 2], [3, 3, 2], [3, 0, 2]]


def test_zeros_of_either_sign_tie() -> None:
    assert _gradient([0.0, -0.0], "max") == [1.5, 1.5]


@pytest.mark.parametrize("op", ["max", "argmax"])
def test_replicas_without_the_extremum_get_zeros_whatever_the_gradient(op: str) -> None:
    repl = helpers.make(3)

    def step(values: Sequence[float], loss: Any) -> tf.Tensor:
        x = helpers.opaque(tf.constant(values)[repl.replica_id])
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = repl.all_reduce(x, op)
            y = loss(total if op == "max" else total.value)
        return tape.gradient(y, x)

    steep = repl.run(lambda: step([1.0, 2.0, 0.0], lambda y: tf.sqrt(y - 2.0)))
    assert [d.numpy() for d in steep] == [0.0, np.inf, 0.0]
    nan = repl.run(lambda: step([1.0, np.nan, 0.0], lambda y: 3.0 * y))
    assert [d.numpy() for d in nan] == [0.0, 9.0, 0.0]  # NaN is the extremum


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_with_zeros(dtype: str) -> None:
    values = [[2.0, 0.0, 0.0], [3.0, 4.0, 0.0], [5.0, 6.0, 7.0]]
    want = [[90, 144, 0], [60, 0, 0], [36, 0, 0]]
    assert _gradient(values, "prod", dtype) == want


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_gradients_are_those_of_tensorflow(op: str, dtype: str) -> None:
    parts = np.random.RandomState(7).randn(2, 3, 2, 5)
    values = (parts[0] + 1j * parts[1]).astype(dtype)
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        x = helpers.opaque(values[repl.replica_id])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.abs(repl.all_reduce(x, op)))
        return tape.gradient(loss, x)

    xs = [tf.constant(value) for value in values]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = xs[0] * xs[1] * xs[2] if op == "prod" else xs[0] + xs[1] + xs[2]
        loss = 3 * tf.reduce_sum(tf.abs(y / 3 if op == "mean" else y))
    for one, two in zip(repl.run(step), tape.gradient(loss, xs), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_integers_have_no_gradient() -> None:
    """TensorFlow requests none; a dual must not communicate nothing."""
    repl = helpers.make(2, build="trace")
    requests = []

    @tf.autograph.experimental.do_not_convert
    def step() -> tf.Tensor:
        y = repl.all_reduce(tf.constant(1))
        op = y.op.inputs[0].op
        placed = placeholder.Placeholder(op, placeholder.read(op))
        requests.append(base.differentiate(all_reduce.gradient, placed, [y]))
        return y

    repl.run(step)
    assert requests == [[None], [None]]


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("full", [False, True])
def test_a_reduction_that_waits_until_it_is_due(full: bool, mode: str) -> None:
    """As for gradient accumulation: zeros until then, and no gradient."""
    repl = helpers.make(3)

    def step() -> Any:
        x = helpers.opaque(2.0)
        when = helpers.opaque(full)
        total, other = all_reduce.reduce_dense([x, x * 2], "mean", when=when)
        actual = tf.gradients(total, x)[0]
        return total, other, tf.constant(actual is None)

    total, other, none = helpers.run(mode, repl, lambda: step)
    assert [float(y) for y in total] == [2.0 * full] * 3
    assert [float(y) for y in other] == [4.0 * full] * 3
    assert all(none)
