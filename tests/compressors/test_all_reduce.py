# SPDX-License-Identifier: Apache-2.0
"""repl.all_reduce with a compressor: its gradient, nests, control flow, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

EVERY = (
    *("bf16", "fp16", "int8", "topk(ratio=0.2)", "powersgd(rank=2)"),
    *("ef(bf16)", "ef(int8)", "ef(topk(ratio=0.2))", "ef(powersgd(rank=2))"),
)
X = np.random.default_rng(0).standard_normal([2, 20, 30]).astype("f")
D = np.random.default_rng(1).standard_normal([2, 20, 30]).astype("f")


def per_replica(*values: Any) -> replicator.PerReplica:
    return replicator.PerReplica(*(tf.constant(v) for v in values))


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "eager") for name in EVERY),
        ("int8", "function"),
        ("ef(bf16)", "session"),
        ("powersgd(rank=2)", "session"),
    ],
)
def test_the_gradient_is_that_of_the_exact_sum(name: str, mode: str) -> None:
    """For any received values; and the gradient itself is not compressed."""
    weights = np.array([1.0, 3.0], "f")

    def make_step() -> Callable[..., Any]:
        def step_fn(element: Any) -> Any:
            x, d, w = element

            def gradients(compressor: Any) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch([x, w])
                    mean = repl.all_reduce(
                        x * x, "mean", weight=w, compressor=compressor
                    )
                    loss = tf.reduce_sum(mean * d)
                return tape.gradient(loss, [x, w]), mean

            (dx, dw), mean = gradients(name)
            (dx_exact, _), _ = gradients(None)
            return dx, dx_exact, dw, mean

        return step_fn

    def input_fn(ctx: replicator.InputContext) -> Any:
        r = ctx.replica_id
        one = tf.data.Dataset.from_tensors((X[r], D[r], weights[r]))
        return helpers.untuned(one)

    repl = helpers.make(2)
    dx, exact, dw, _ = helpers.run(mode, repl, make_step, input_fn)
    # By NumPy: each loss depends on all replicas' x, by their weights.
    shares = weights / weights.sum()
    for r in range(2):
        np.testing.assert_allclose(dx[r], 2 * X[r] * shares[r] * D.sum(0), rtol=1e-4)
        np.testing.assert_allclose(dx[r], exact[r], rtol=1e-4)
        mean = (shares[:, None, None] * X**2).sum(0)
        expected = ((X[r] ** 2 - mean) * D.sum(0)).sum() / weights.sum()
        np.testing.assert_allclose(dw[r], expected, rtol=1e-3)


def test_second_derivatives_are_those_of_the_exact_sum() -> None:
    repl = helpers.make(2)

    def step_fn(x: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                total = repl.all_reduce(x**3, compressor="bf16")
                loss = tf.reduce_sum(total)
            first = inner.gradient(loss, x)
        return outer.gradient(first, x)

    second = repl.run(step_fn, args=[per_replica(*X)])
    for r in range(2):
        np.testing.assert_allclose(second[r], 2 * 6 * X[r], rtol=1e-5)


def test_gradients_without_tapes() -> None:
    repl = helpers.make(2)

    def step_fn(x: tf.Tensor) -> Any:
        total = repl.all_reduce(x * x, compressor="int8")
        return tf.gradients(total, x)[0]

    actual = repl.run(step_fn, args=[per_replica(*X)])
    for r in range(2):
        np.testing.assert_allclose(actual[r], 2 * 2 * X[r], rtol=1e-5)


def test_nests_of_what_can_be_compressed_and_what_cannot() -> None:
    repl = helpers.make(2)
    value = {
        "float": tf.constant([1.001, 2.0]),
        "int": tf.constant([2**30 - 1]),
        "complex": tf.constant([1.001 + 2j], tf.complex64),
        "none": [],
    }
    actual = repl.run(lambda: repl.all_reduce(value, compressor="bf16"))
    np.testing.assert_array_equal(actual["float"][0], [2.0, 4.0])
    np.testing.assert_array_equal(actual["int"][0], [2**31 - 2])
    np.testing.assert_array_equal(actual["complex"][0], value["complex"] * 2)
    assert actual["none"] == []


@pytest.mark.parametrize("name", ["bf16", "int8", "ef(bf16)"])
def test_rows_of_sparse_gradients_are_cast_at_most(name: str) -> None:
    """Repeated rows are summed in float32, and not rounded once more."""
    repl = helpers.make(2)
    values = np.array([[[1.001], [4.0]], [[3.0], [0.001]]], "f")
    indices = np.array([[0, 3], [3, 3]])

    def step_fn(values: tf.Tensor, indices: tf.Tensor) -> Any:
        rows = tf.IndexedSlices(values, indices, [5, 1])
        reduced = repl.all_reduce(rows, "mean", compressor=name)
        return reduced.values, reduced.indices

    arguments = [per_replica(*values), per_replica(*indices)]
    actual, places = repl.run(step_fn, args=arguments)
    half = (values / 2).astype("f")
    if name == "bf16":
        half = tf.cast(tf.cast(half, tf.bfloat16), tf.float32).numpy()
    np.testing.assert_array_equal(places[0], [0, 3])
    expected = [half[0, 0], half[0, 1] + half[1, 0] + half[1, 1]]
    np.testing.assert_array_equal(actual[0], expected)


def in_a_branch(function: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.cond(helpers.opaque(True), function, lambda: tf.zeros([20, 30]))


def in_a_function(function: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.function(function)()


def in_a_loop(function: Callable[[], tf.Tensor]) -> tf.Tensor:
    """For the state, each turn is one more step."""
    return tf.while_loop(
        lambda i, _: i < 3,
        lambda i, total: (i + 1, total + function()),
        (0, tf.zeros([20, 30])),
    )[1]


@pytest.mark.battery(5)
@pytest.mark.parametrize("place", [in_a_branch, in_a_function, in_a_loop])
@pytest.mark.parametrize("name", ["int8", "ef(powersgd(start_step=1))"])
def test_in_control_flow(name: str, place: Callable[..., tf.Tensor]) -> None:
    repl = helpers.make(2)

    def step_fn(x: tf.Tensor) -> Any:
        return place(lambda: repl.all_reduce(x, compressor=name))

    actual = repl.run(step_fn, args=[per_replica(*X)])
    assert actual[0].numpy().tobytes() == actual[1].numpy().tobytes()
    times = 3 if place is in_a_loop else 1
    tolerance = 30.0 if "powersgd" in name and times > 1 else 0.2
    np.testing.assert_allclose(actual[0], times * X.sum(0), atol=tolerance)


def test_feedback_in_a_loop_adds_up() -> None:
    repl = helpers.make(2)

    def step_fn(x: tf.Tensor) -> Any:
        loop = in_a_loop(lambda: repl.all_reduce(x, compressor="ef(bf16)"))
        return loop, in_a_loop(lambda: repl.all_reduce(x, compressor="bf16"))

    with_it, without = (leaf[0] for leaf in repl.run(step_fn, args=[per_replica(*X)]))
    exact = 3 * X.sum(0)
    assert np.abs(with_it - exact).mean() < np.abs(without - exact).mean() / 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda repl: repl.all_reduce(1.0, "max", compressor="bf16"),
            r"was given op='max' with a compressor.*op=\"sum\" or op=\"mean\"",
        ),
        (
            lambda repl: repl.all_reduce(1.0, weight=1.0, compressor="bf16"),
            r"was given a weight with op='sum'.*weights only with op=\"mean\"",
        ),
        (
            lambda repl: repl.all_reduce(1.0, compressor="zip"),
            r"'zip' names 'zip', which is not a comp.*use one of \"fp16\", \"bf16\"",
        ),
        (
            lambda repl: repl.all_reduce(1.0, compressor=int),
            r"all_reduce was given compressor=<class 'int'>.*pass a Compressor",
        ),
        (
            lambda repl: repl.all_reduce("x", compressor="bf16"),
            r"was asked for the sum of string",
        ),
    ],
)
def test_mistakes(call: Callable[..., Any], said: str) -> None:
    repl = helpers.make(2)

    def step_fn() -> Any:
        return call(repl)

    with pytest.raises(replicator.ArgumentError, match=f"(?s){said}") as raised:
        repl.run(step_fn)
    assert "test_all_reduce.py:" in str(raised.value)


def test_outside_of_a_step() -> None:
    with pytest.raises(replicator.ContextError, match="all_reduce was called outside"):
        helpers.make(2).all_reduce(1.0, compressor="bf16")


def test_replicas_that_compress_differently() -> None:
    repl = helpers.make(2)

    def step_fn() -> Any:
        return repl.all_reduce(1.0, compressor=["bf16", "fp16"][repl.replica_id])

    with pytest.raises(
        replicator.MismatchError, match=r"(?s)bfloat16\[\].*float16\[\]"
    ):
        repl.run(step_fn)


def test_one_replica_sends_nothing_and_loses_nothing() -> None:
    repl = helpers.make(1)
    for name in EVERY:
        actual = repl.run(lambda name=name: repl.all_reduce(X[0], compressor=name))
        np.testing.assert_array_equal(actual[0], X[0])
