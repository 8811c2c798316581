# SPDX-License-Identifier: Apache-2.0
"""Checks the guides' advice on losses for tf.distribute against plain TensorFlow.

The reference is one step of gradient descent on a linear model, on one device with the
whole batch, which two replicas must reproduce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers

_BATCH, _REPLICAS, _RATE = 8, 2, 0.1
_X = np.random.default_rng(0).normal(size=[_BATCH, 3]).astype(np.float32) * 3
_Y = np.random.default_rng(1).normal(size=[_BATCH, 1]).astype(np.float32)


def _errors_of(w: Any, x: Any, y: Any) -> tf.Tensor:
    """Returns the loss of each example, [batch]."""
    return tf.reduce_sum((x @ w - y) ** 2, axis=1)


def _gradient() -> np.ndarray:
    """Returns the gradient of the mean loss of the whole batch, by its formula."""
    return 2 * _X.T @ (_X @ np.ones([3, 1]) - _Y) / _BATCH


def _one_device(clip: float | None = None) -> np.ndarray:
    gradient = _gradient()
    if clip is not None:
        gradient *= min(1.0, clip / np.linalg.norm(gradient))
    return 1.0 - _RATE * gradient


def _replicas(
    loss_fn: Callable[[Any], tf.Tensor],
    op: str = "mean",
    change: Callable[[Any, Any], Any] = lambda repl, gradient: gradient,
    **options: Any,
) -> np.ndarray:
    """Returns the weights after one step on both replicas.

    Args:
        loss_fn: Reduces the losses of a replica's examples.
        op: The op of the wrapped optimizer.
        change: What step_fn does to the gradient before it applies it.
        **options: Options of the optimizer.
    """
    repl = helpers.make(_REPLICAS)
    with repl.context():
        w = tf.Variable(np.ones([3, 1], np.float32))
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(_RATE, **options), op)

    def step_fn(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_fn(_errors_of(w, x, y))
        gradient = change(repl, tape.gradient(loss, w))
        optimizer.apply_gradients([(gradient, w)])

    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(_BATCH)
    repl.run(step_fn, data, input_mode="global_batch")
    helpers.assert_replicas_equal([w])
    return w.numpy()


def _same(one: Any, other: Any) -> bool:
    return np.allclose(one, other, rtol=1e-4, atol=1e-5)


# --- Losses divided by the global batch size ------------------------------------------


def _by_global_size(losses: tf.Tensor) -> tf.Tensor:
    return tf.nn.compute_average_loss(losses, global_batch_size=_BATCH)


def test_a_loss_over_the_global_batch_size_wants_the_sum() -> None:
    wrong = 1.0 - _RATE * _gradient() / _REPLICAS
    assert _same(_replicas(_by_global_size), wrong)  # a step half as long
    assert _same(_replicas(_by_global_size, "sum"), _one_device())


@pytest.mark.parametrize("mean", [tf.reduce_mean, tf.nn.compute_average_loss])
def test_the_mean_over_a_replicas_examples_wants_the_mean(mean: Any) -> None:
    assert _same(_replicas(mean), _one_device())


def test_the_number_of_replicas_divides_too() -> None:
    """As in programs that ask the strategy for it."""

    def loss_fn(losses: tf.Tensor) -> tf.Tensor:
        strategy = tf.distribute.get_strategy()
        return tf.reduce_mean(losses) / strategy.num_replicas_in_sync

    assert _same(_replicas(loss_fn), 1.0 - _RATE * _gradient() / _REPLICAS)
    assert _same(_replicas(loss_fn, "sum"), _one_device())


def test_regularization_is_not_to_be_scaled() -> None:
    """tf.nn.scale_regularization_loss does not change it in a step."""
    repl = helpers.make(_REPLICAS)
    with repl.context():
        w = tf.Variable([2.0])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(_RATE))

    def step_fn() -> None:
        with tf.GradientTape() as tape:
            loss = tf.nn.scale_regularization_loss(tf.reduce_sum(w**2))
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])

    repl.run(step_fn)
    np.testing.assert_allclose(w, [2.0 - _RATE * 4.0], rtol=1e-6)


# --- Summed losses --------------------------------------------------------------------


def test_a_summed_loss_wants_the_sum() -> None:
    whole = 1.0 - _RATE * _gradient() * _BATCH  # on one device with the whole batch
    wrong = 1.0 - _RATE * _gradient() * _BATCH / _REPLICAS
    assert _same(_replicas(tf.reduce_sum), wrong)
    assert _same(_replicas(tf.reduce_sum, "sum"), whole)


def test_a_summed_metric_is_reduced_by_sum() -> None:
    repl = helpers.make(_REPLICAS)
    data = tf.data.Dataset.from_tensor_slices(_Y).batch(_BATCH)

    def step_fn(y: Any) -> Any:
        total = tf.reduce_sum(y)
        return repl.all_reduce(total), repl.all_reduce(total, "mean")

    total, wrong = repl.run(step_fn, data, input_mode="global_batch")
    np.testing.assert_allclose(float(total), _Y.sum(), rtol=1e-5)
    np.testing.assert_allclose(float(wrong), _Y.sum() / _REPLICAS, rtol=1e-5)


# --- Clipping -------------------------------------------------------------------------


def test_clipping_before_apply_clips_what_was_not_combined() -> None:
    """Each replica's own gradient has another norm than their mean."""
    assert np.linalg.norm(_gradient()) > 1.0

    def clipped(repl: Any, gradient: Any) -> Any:
        return tf.clip_by_global_norm([gradient], 1.0)[0][0]

    def combined(repl: Any, gradient: Any) -> Any:
        mean = repl.all_reduce(gradient, "mean", weight=repl.weight)
        return clipped(repl, mean)

    assert not _same(_replicas(tf.reduce_mean, change=clipped), _one_device(clip=1.0))
    assert _same(_replicas(tf.reduce_mean, change=combined), _one_device(clip=1.0))
    by_optimizer = _replicas(tf.reduce_mean, global_clipnorm=1.0)
    assert _same(by_optimizer, _one_device(clip=1.0))


# --- Keras' own step ------------------------------------------------------------------


def _compiled(repl: Any, optimizer: Any) -> Any:
    """Returns a model that was compiled under the context."""
    with repl.context():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)])
        model.build([None, 3])
        model.set_weights([np.ones([3, 1], np.float32)])
        model.compile(optimizer(repl), "mse", metrics=["mae"])
    return model


def _wrapped(repl: Any) -> Any:
    return repl.wrap_optimizer(tf.keras.optimizers.SGD(_RATE))


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_train_step_of_keras_is_a_step_fn(mode: str) -> None:
    repl = helpers.make(_REPLICAS)
    model = _compiled(repl, _wrapped)
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(_BATCH)
    run: Any = lambda: repl.run(model.train_step, data, input_mode="global_batch")  # noqa: E731
    logs = (tf.function(run) if mode == "function" else run)()
    assert _same(model.get_weights()[0], _one_device())
    squared = np.mean((_X @ np.ones([3, 1]) - _Y) ** 2)
    absolute = np.mean(np.abs(_X @ np.ones([3, 1]) - _Y))
    for results in (logs, model.get_metrics_result()):
        np.testing.assert_allclose(results["loss"], squared, rtol=1e-5)
        np.testing.assert_allclose(results["mae"], absolute, rtol=1e-5)


def test_a_train_step_of_keras_takes_batches_of_any_size() -> None:
    """Even one that leaves a replica none, whose loss is NaN."""
    repl = helpers.make(3)
    model = _compiled(repl, _wrapped)
    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(3)
    weights = np.ones([3, 1])
    for k in (0, 3, 6):
        repl.run(model.train_step, data, input_mode="global_batch")
        x, y = _X[k : k + 3], _Y[k : k + 3]
        weights = weights - _RATE * 2 * x.T @ (x @ weights - y) / len(x)
        np.testing.assert_allclose(model.get_weights()[0], weights, rtol=1e-4)


@pytest.mark.parametrize("loop", ["fit", "train_on_batch"])
def test_a_loop_of_keras_that_trains_on_one_device_is_warned_of_once(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    def train(repl: Any, optimizer: Any) -> list[str]:
        model = _compiled(repl, optimizer)
        caplog.clear()
        for batch in (_BATCH, 3):
            getattr(model, loop)(_X[:batch], _Y[:batch])
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if "Keras'" in message]

    (message,) = train(helpers.make(3), _wrapped)
    assert (
        f"Keras' {loop} updates " in message and "a variable of 3 replicas" in message
    )
    assert (
        "by SGD outside of any step" in message and "the others do nothing" in message
    )
    assert "repl.run(model.train_step, input_fn)" in message
    assert not train(helpers.make(1), _wrapped)


@pytest.mark.parametrize("loop", ["fit", "train_on_batch"])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_forgotten_keras_model_is_told_once(
    run_eagerly: bool, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The model was made and compiled under the context, which wraps no optimizer."""

    def train(repl: Any) -> list[str]:
        model = _compiled(repl, lambda _: tf.keras.optimizers.Adam(0.1))
        model.run_eagerly = run_eagerly
        caplog.clear()
        for batch in (_BATCH, 3):
            getattr(model, loop)(_X[:batch], _Y[:batch])
        found = [record.getMessage() for record in caplog.records]
        return [said for said in found if "Keras'" in said]

    (said,) = train(helpers.make(3))
    assert f"Keras' {loop} updates " in said and "a variable of 3 replicas" in said
    assert "by Adam outside of any step" in said and "repl.keras_model(model)" in said
    assert not train(helpers.make(1))


def test_a_model_that_runs_on_replicas_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even where a last batch of one example runs on one device."""
    repl = helpers.make(2)
    for optimizer in (_wrapped, lambda _: tf.keras.optimizers.SGD(_RATE)):
        model = repl.keras_model(_compiled(repl, optimizer))
        model.fit(_X[:5], _Y[:5], batch_size=4, verbose=0)
    assert not [r for r in caplog.records if "Keras'" in r.getMessage()]


def test_an_optimizer_that_is_applied_outside_by_hand_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repl = helpers.make(2)
    with repl.context():
        v, optimizer = tf.Variable(1.0), _wrapped(repl)
    optimizer.apply_gradients([(tf.constant(1.0), v)])
    assert not caplog.records
    np.testing.assert_allclose(float(v), 0.9, rtol=1e-6)
    helpers.assert_replicas_equal([v])
