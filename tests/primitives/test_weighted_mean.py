# SPDX-License-Identifier: Apache-2.0
"""all_reduce(x, "mean", weight=...): the mean over all examples, on any replica."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers, sampling

FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]


def _mean(values: Any, weights: Any, dtype: str = "float32") -> list[np.ndarray]:
    repl = helpers.make(len(values))
    results = repl.run(
        lambda: repl.all_reduce(
            helpers.opaque(tf.constant(values[repl.replica_id], dtype)),
            "mean",
            weight=weights[repl.replica_id],
        )
    )
    return [y.numpy() for y in results]


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_weighted_mean(dtype: str) -> None:
    for y in _mean([3.0, 7.0, 1.0], [1, 2, 1], dtype):
        assert y.dtype == tf.as_dtype(dtype).as_numpy_dtype
        assert y == 4.5


def test_the_mean_over_uneven_shards_is_that_over_all_examples() -> None:
    shards = [np.random.RandomState(r).rand(n) for r, n in enumerate([3, 1, 0, 4])]
    repl = helpers.make(4)

    def step() -> tf.Tensor:
        shard = helpers.opaque(shards[repl.replica_id], [None])
        return repl.all_reduce(tf.reduce_mean(shard), "mean", weight=tf.size(shard))

    for y in repl.run(step):  # the mean over no examples is NaN, with weight 0
        np.testing.assert_allclose(y, np.concatenate(shards).mean(), rtol=1e-14)


@pytest.mark.parametrize("nothing", [np.nan, np.inf, 1.0])
def test_all_weights_zero_give_zero(nothing: float) -> None:
    assert _mean([nothing, 2.0], [0, 0]) == [0.0, 0.0]


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("nothing", "dtype", "mode"),
    sampling.in_turn([np.nan, np.inf, -np.inf], [*FLOATS, *COMPLEX], helpers.MODES),
)
def test_weight_zero_keeps_nan_out(nothing: float, dtype: str, mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        row = [[nothing, 1.0], [2.0, 4.0]][repl.replica_id]
        x = helpers.opaque(tf.constant(row, dtype))
        weight = helpers.opaque(repl.replica_id * 3)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x, "mean", weight=weight)
        return y, tape.gradient(y, x)

    y, d = helpers.run(mode, repl, lambda: step)
    np.testing.assert_array_equal(np.stack(y).astype(complex), [[2, 4]] * 2)
    np.testing.assert_array_equal(np.stack(d).astype(complex), [[0, 0], [2, 2]])


def test_weight_zero_keeps_nan_out_of_slices() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        rows = helpers.opaque([[np.nan], [3.0]][repl.replica_id])[:, tf.newaxis]
        x = tf.IndexedSlices(rows, tf.constant([1]), tf.constant([2, 1]))
        y = repl.all_reduce(x, "mean", weight=repl.replica_id)
        return tf.convert_to_tensor(y)

    np.testing.assert_array_equal(repl.run(step), [[[0], [3]]] * 2)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_groups_weigh_among_themselves(mode: str) -> None:
    """Here all members of one group have weight 0."""
    values, weights = [5.0, 1.0, 7.0, 4.0], [0.0, 1.0, 0.0, 2.0]
    repl = helpers.make(4)

    def step() -> Any:
        x = helpers.opaque(values[repl.replica_id])
        w = helpers.opaque(weights[repl.replica_id])
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            halves = repl.groups([[0, 2], [1, 3]])
            y = repl.all_reduce(x, "mean", weight=w, group=halves)
        return y, *tape.gradient(y, [x, w])

    y, dx, dw = helpers.run(mode, repl, lambda: step)
    np.testing.assert_allclose(y, [0, 3, 0, 3], rtol=1e-6)
    np.testing.assert_allclose(dx, [0, 2 / 3, 0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(dw, [0, -4 / 3, 0, 2 / 3], rtol=1e-6)


def _both(x: tf.Tensor, w: tf.Tensor, loss: Any) -> Any:
    """Returns the first derivatives, and those of their sum weighted by cosines."""
    with tf.GradientTape() as outer:
        outer.watch([x, w])
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            value = loss()
        dx, dw = tape.gradient(value, [x, w])
        slope = tf.reduce_sum(dx * tf.cos(tf.stop_gradient(x)))
        slope += tf.reduce_sum(dw * tf.cos(tf.stop_gradient(w)))
    return dx, dw, *outer.gradient(slope, [x, w])


@pytest.mark.parametrize("weights", [[2.0, 1.0, 3.0], [2.0, 0.0, 3.0]], ids=str)
def test_two_derivatives_by_values_and_weights(weights: Any) -> None:
    """A weight of 0 has a slope too: the effect of one example there."""
    values = np.array([1.0, 4.0, -2.0])
    repl = helpers.make(3)

    def step() -> Any:
        r = repl.replica_id
        x, w = helpers.opaque(values[r]), helpers.opaque(np.float64(weights[r]))
        return _both(
            x, w, lambda: (r + 1.0) * repl.all_reduce(x, "mean", weight=w) ** 3
        )

    x, w = tf.constant(values), tf.constant(weights, tf.float64)
    want = _both(x, w, lambda: 6.0 * (tf.reduce_sum(w * x) / tf.reduce_sum(w)) ** 3)
    for one, two in zip(repl.run(step), want, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12)


def test_large_counts_are_added_up_exactly() -> None:
    """As float32 both would be 2**24, and the mean 0.5 of the first weight too much."""
    n = 2**24
    got = _mean([1.0, 0.0], [n + 1, n], "float64")
    assert got == [(n + 1) / (2 * n + 1)] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_do_not_overflow_16_bits(dtype: str) -> None:
    for y in _mean([100.0, 300.0], [100_000, 100_000], dtype):
        assert y == 200.0


def test_weights_of_different_dtypes_pair() -> None:
    assert _mean([3.0, 7.0, 1.0], [np.int64(1), 2.0, True]) == [4.5] * 3


def _by_weight(repl: Any, x: tf.Tensor) -> tf.Tensor:
    return repl.all_reduce(tf.reduce_mean(x), "mean", repl.weight)


def _by_a_cast_weight(repl: Any, x: tf.Tensor) -> tf.Tensor:
    return repl.all_reduce(tf.reduce_mean(x), "mean", tf.cast(repl.weight, x.dtype))


def _by_a_captured_weight(repl: Any, x: tf.Tensor) -> tf.Tensor:
    weight = repl.weight
    return tf.cond(
        helpers.opaque(True),
        lambda: repl.all_reduce(tf.reduce_mean(x), "mean", weight),
        lambda: tf.zeros([], x.dtype),
    )


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("mean", [_by_weight, _by_a_cast_weight, _by_a_captured_weight])
def test_means_of_float64_are_exact(mean: Any, mode: str) -> None:
    """`repl.weight` is a float32, which no share of 7 examples is exactly."""
    x = np.random.RandomState(0).rand(7)
    repl = helpers.make(3)
    inputs = tf.data.Dataset.from_tensor_slices(x).batch(7)

    def step(x: tf.Tensor) -> tf.Tensor:
        return mean(repl, x)

    def run() -> Any:
        return repl.run(step, inputs, input_mode="global_batch")

    if mode == "session":
        with tf.Graph().as_default():
            inputs = tf.data.Dataset.from_tensor_slices(x).batch(7)
            fetch = run()
            with helpers.monitored_session() as session:
                got = session.run(fetch)
    else:
        got = tf.function(run)() if mode == "function" else run()
    np.testing.assert_allclose(got, x.mean(), rtol=1e-14)
