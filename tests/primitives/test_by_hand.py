# SPDX-License-Identifier: Apache-2.0
"""Weighted means of gradients that steps take without a wrapped optimizer.

They are those of one device with the whole batch, whatever the forward pass
communicates and however the batch divides. Other weights are refused for them, unless
they are equal. Means of values, which have no axis of examples left, stay what they
are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.primitives import test_weighing as losses
from tests.primitives.losses import (
    SIZES,
    Repl,
    W,
    X,
    gathered,
    gradient_of,
    mean,
    one_device,
    results,
    update,
)

_gradient = gradient_of(gathered)


def _averaged(repl: Repl, w: Any, x: Any) -> Any:
    return mean(repl, _gradient(repl, w, x))


def _assert_as_on_one_device(fn: Any, size: int, batch: Any = None) -> None:
    want = one_device(fn, size)
    for got in results(fn, X[:size] if batch is None else batch):
        np.testing.assert_allclose(got, want, atol=1e-7)


@pytest.mark.battery(6)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss_fn", losses.LOSSES)
def test_it_is_the_gradient_of_one_device(loss_fn: Any, size: int) -> None:
    gradient_fn = gradient_of(loss_fn)
    _assert_as_on_one_device(
        lambda repl, w, x: mean(repl, gradient_fn(repl, w, x)), size
    )


# --- What is done to gradients before -------------------------------------------------


def _scaled(repl: Repl, w: Any, x: Any) -> Any:
    return mean(repl, 0.5 * _gradient(repl, w, x) / 1024.0)


def _decayed(repl: Repl, w: Any, x: Any) -> Any:
    return mean(repl, _gradient(repl, w, x) + 0.1 * w)


def _flat(repl: Repl, w: Any, x: Any) -> Any:
    gradient = tf.cast(_gradient(repl, w, x), tf.float32)
    flat = tf.concat([tf.reshape(gradient, [-1]), tf.zeros([3])], 0)
    return mean(repl, flat)


def _finite(repl: Repl, w: Any, x: Any) -> Any:
    gradient = _gradient(repl, w, x)
    finite = tf.math.is_finite(gradient)
    return mean(repl, tf.where(finite, gradient, tf.zeros_like(gradient)))


def _in_a_function(repl: Repl, w: Any, x: Any) -> Any:
    return tf.function(lambda: mean(repl, _gradient(repl, w, x)))()


def _of_a_function(repl: Repl, w: Any, x: Any) -> Any:
    return mean(repl, tf.function(lambda: _gradient(repl, w, x))())


def _of_a_loop(repl: Repl, w: Any, x: Any) -> Any:
    total = tf.while_loop(
        lambda k, _: k < 3,
        lambda k, total: (k + 1, total + _gradient(repl, w, x)),
        [0, tf.zeros_like(W)],
    )[1]
    return mean(repl, total)


def _weight_read_outside(repl: Repl, w: Any, x: Any) -> Any:
    weight = None if repl is None else tf.cast(repl.weight, tf.float64)

    @tf.function
    def inner() -> Any:
        gradient = _gradient(repl, w, x)
        if repl is None:
            return gradient
        return repl.all_reduce(gradient, "mean", weight=weight * 3)

    return inner()


def _rows(repl: Repl, w: Any, x: Any) -> Any:
    """Rows of an embedding, whose gradient is sparse."""
    with tf.GradientTape() as tape:
        rows = tf.gather(w, tf.cast(x[:, 0] > 0, tf.int32))
        loss = gathered(repl, tf.constant(W), rows)
    return tf.convert_to_tensor(mean(repl, tape.gradient(loss, w)))


def _inner_step(repl: Repl, w: Any, x: Any) -> Any:
    """A gradient through an inner step, whose gradient is averaged, too."""
    with tf.GradientTape() as tape:
        moved = w - mean(repl, _gradient(repl, w, x))
        loss = losses._normalized(repl, moved, x)
    return mean(repl, tape.gradient(loss, w))


def _sharpness_aware(repl: Repl, w: Any, x: Any) -> Any:
    """A gradient at a point that another gradient leads to."""
    first = mean(repl, _gradient(repl, w, x))
    return mean(repl, _gradient(repl, w + first / tf.norm(first), x))


@pytest.mark.battery(3)
@pytest.mark.parametrize("size", [5, 2])
@pytest.mark.parametrize(
    "step_fn",
    [
        *(_scaled, _decayed, _flat, _finite, _in_a_function, _of_a_function),
        *(_of_a_loop, _weight_read_outside, _rows, _inner_step, _sharpness_aware),
    ],
)
def test_whatever_is_done_to_it_before(step_fn: Any, size: int) -> None:
    _assert_as_on_one_device(step_fn, size)


def test_in_a_session() -> None:
    repl = helpers.make(3)
    with tf.Graph().as_default(), helpers.session() as session:
        with repl.context():
            w = tf.Variable(W)
        x = tf.compat.v1.placeholder(tf.float64, [None, 2])
        result = repl.run(lambda x: _averaged(repl, w, x), x, "global_batch")
        session.run(tf.compat.v1.global_variables_initializer())
        got = session.run(result[0], {x: X[:5]})
    np.testing.assert_allclose(got, one_device(_gradient, 5), atol=1e-7)


def test_by_a_compressor() -> None:
    def step_fn(repl: Any, w: Any, x: Any) -> Any:
        gradient = _gradient(repl, w, x)
        return repl.all_reduce(gradient, "mean", repl.weight, compressor="fp16")

    for got in results(step_fn, X[:5]):
        np.testing.assert_allclose(got, one_device(_gradient, 5), rtol=5e-3)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_an_optimizer_may_apply_the_result(op: str) -> None:
    """Gradients are clipped by their common norm: the mean is equal on all replicas."""

    def clipped(repl: Repl, w: Any, x: Any) -> Any:
        (gradient,), _ = tf.clip_by_global_norm([_averaged(repl, w, x)], 1e-3)
        return gradient / 3.0 if op == "sum" and repl is not None else gradient

    found = update(clipped, X[:5], op=op)
    np.testing.assert_allclose(found, one_device(clipped, 5), atol=1e-10)


# --- Values ---------------------------------------------------------------------------


def _slope(repl: Repl, w: Any, x: Any, of: str) -> Any:
    """The gradient of the sum of all examples' values, which affect each other."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(x @ w)
        y -= losses._centre(repl, y**2)
        total = tf.reduce_sum(y * x)
    return tape.gradient(total, {"x": x, "w": w}[of])


def _mean_slope(repl: Repl, w: Any, x: Any) -> Any:
    return mean(repl, tf.reduce_mean(_slope(repl, w, x, "x"), 0))


def _per_example(repl: Repl, w: Any, x: Any) -> Any:
    return mean(repl, _slope(repl, w, x, "w") / tf.cast(tf.shape(x)[0], x.dtype))


@pytest.mark.parametrize("fn", [_mean_slope, _per_example])
@pytest.mark.parametrize("size", [5, 4])
def test_means_of_values_are_those_of_all_examples(fn: Any, size: int) -> None:
    _assert_as_on_one_device(fn, size)


# --- Other weights --------------------------------------------------------------------


def _by_tokens(repl: Any, w: Any, x: Any) -> Any:
    return repl.all_reduce(_gradient(repl, w, x), "mean", weight=tf.shape(x)[0])


def test_weights_that_are_computed_are_refused_if_they_differ() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        results(_by_tokens, X[:5])
    message = str(raised.value)
    assert "all_reduce on replica" in message and "the weights differ" in message
    assert "test_by_hand.py:" in message, message
    assert "weight=repl.weight" in message


@pytest.mark.parametrize("by", ["weight", "tokens"])
def test_optimizers_take_the_weight_itself_alone(by: str) -> None:
    repl = helpers.make(3)
    with repl.context():
        w = tf.Variable(W)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))

    def step_fn(x: Any) -> None:
        weight = repl.weight if by == "weight" else tf.shape(x)[0]
        optimizer.apply([_gradient(repl, w, x)], [w], weight=weight)

    if by == "weight":
        repl.run(step_fn, X[:5], "global_batch")
        np.testing.assert_allclose(W - w.numpy(), one_device(_gradient, 5), atol=1e-7)
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="SGD on replica"):
        repl.run(step_fn, X[:5], "global_batch")
    np.testing.assert_array_equal(w.numpy(), W)


def test_equal_weights_leave_gradients_of_the_sum_of_all_losses() -> None:
    def step_fn(repl: Any, w: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = gathered(repl, w, x)
            loss *= 3 * tf.cast(repl.weight, loss.dtype)
        gradient = tape.gradient(loss, w)
        return repl.all_reduce(gradient, "mean", weight=tf.constant(0.3))

    for got in results(step_fn, X[:5]):
        np.testing.assert_allclose(got, one_device(_gradient, 5), atol=1e-7)


def test_any_weights_go_with_gradients_that_passed_no_communication() -> None:
    def step_fn(repl: Repl, w: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w) ** 3)
        gradient = tape.gradient(loss, w)
        if repl is None:
            return gradient
        _gradient(repl, w, x)  # another one
        return repl.all_reduce(gradient, "mean", weight=tf.shape(x)[0])

    _assert_as_on_one_device(step_fn, 5)
