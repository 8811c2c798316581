# SPDX-License-Identifier: Apache-2.0
"""Replicated training equals training on one device with the whole batch.

SGD, Momentum and Adam, a dense and a convolutional network, 20 steps of a global batch
of 64 on 1, 2 and 4 replicas: losses and final weights agree to 1e-5, the replicas'
variables are bitwise equal after every step, and so are two runs.

Weights are compared relative to the largest weight of their tensor: where a weight
passes through zero, its last bits are the rounding errors of the cancelling terms, on
one device as on many.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

STEPS = 20
BATCH = 64
TOLERANCE = 1e-5

layers = tf.keras.layers
Initial = tuple[np.ndarray, ...]

OPTIMIZERS = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
    "momentum": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(0.01),
}


def _dense() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(32, "relu"),
            layers.Dense(16, "tanh"),
            layers.Dense(10),
        ]
    )


def _conv() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


MODELS = {"dense": _dense, "conv": _conv}


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a training: losses [STEPS], and all variables' final values."""

    losses: np.ndarray
    weights: list[np.ndarray]
    slots: list[np.ndarray]


@functools.cache
def _data(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns images [STEPS * BATCH, 8, 8, 1] and labels that can be learned."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 10, STEPS * BATCH)
    classes = rng.standard_normal((10, 8, 8, 1))
    images = classes[labels] + rng.standard_normal((STEPS * BATCH, 8, 8, 1))
    return images.astype(dtype), labels


@functools.cache
def _initial(model: str) -> Initial:
    tf.keras.utils.set_random_seed(7)
    return tuple(MODELS[model]().get_weights())


def _loss(model: tf.keras.Model, images: Any, labels: Any) -> tf.Tensor:
    logits = model(images, training=True)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


def _update(model: tf.keras.Model, optimizer: Any, images: Any, labels: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = _loss(model, images, labels)
    variables = model.trainable_variables
    optimizer.apply_gradients(
        zip(tape.gradient(loss, variables), variables, strict=True)
    )
    return loss


def _in_dtype(dtype: str) -> Any:
    """Sets Keras' default dtype; returns the previous one."""
    before = tf.keras.config.floatx()
    tf.keras.config.set_floatx(dtype)
    tf.keras.config.set_dtype_policy(dtype)
    return before


@functools.cache
def _plain(model_name: str, optimizer_name: str, dtype: str = "float32") -> Trained:
    before = _in_dtype(dtype)
    try:
        model = MODELS[model_name]()
        model.set_weights(_initial(model_name))
        optimizer = OPTIMIZERS[optimizer_name]()
        step = tf.function(functools.partial(_update, model, optimizer))
        images, labels = _data(dtype)
        losses = []
        for k in range(0, STEPS * BATCH, BATCH):
            losses.append(
                step(
                    tf.constant(images[k : k + BATCH]),
                    tf.constant(labels[k : k + BATCH]),
                )
            )
    finally:
        _in_dtype(before)
    return _trained(losses, model, optimizer)


def _trained(losses: Any, model: tf.keras.Model, optimizer: Any) -> Trained:
    return Trained(
        np.array([loss.numpy() for loss in losses]),
        model.get_weights(),
        [np.asarray(variable) for variable in optimizer.variables],
    )


def _replicated(
    replicas: int, model_name: str, optimizer_name: str, dtype: str = "float32"
) -> Trained:
    """Trains on replicas, and compares their variables bitwise after every step."""
    repl = helpers.make(replicas)
    before = _in_dtype(dtype)
    try:
        with repl.context():
            model = MODELS[model_name]()
            model.set_weights(_initial(model_name))
            optimizer = repl.wrap_optimizer(OPTIMIZERS[optimizer_name]())

        def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
            size = ctx.per_replica_batch_size(BATCH)
            shares = tf.data.Dataset.from_tensor_slices(_data(dtype)).batch(size)
            return helpers.untuned(shares.shard(ctx.num_pipelines, ctx.pipeline_id))

        def step_fn(batch: Any) -> tf.Tensor:
            return repl.all_reduce(_update(model, optimizer, *batch), "mean")

        losses = []
        for _ in range(STEPS):
            reference, *others = repl.run(step_fn, input_fn)
            losses.append(reference)
            assert all(other.numpy() == reference.numpy() for other in others)
            helpers.assert_replicas_equal([*model.variables, *optimizer.variables])
        with pytest.raises(tf.errors.OutOfRangeError):
            repl.run(step_fn, input_fn)  # all of the data was used
    finally:
        _in_dtype(before)
    return _trained(losses, model, optimizer)


def _distance(one: np.ndarray, two: np.ndarray) -> float:
    """Returns the largest difference, as a share of the largest entry."""
    return float(np.max(np.abs(one - two)) / np.max(np.abs(two)))


def _check(actual: Trained, expected: Trained, tolerance: float) -> None:
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=tolerance)
    far = [
        _distance(one, two)
        for one, two in zip(actual.weights, expected.weights, strict=True)
    ]
    assert max(far) <= tolerance, far
    assert expected.losses[-1] < 0.98 * expected.losses[0]  # it did train


@pytest.mark.battery(5)
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_equals_one_device(model: str, optimizer: str, replicas: int) -> None:
    actual = _replicated(replicas, model, optimizer)
    _check(actual, _plain(model, optimizer), TOLERANCE)


@pytest.mark.battery(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_equals_one_device_in_float64(model: str, optimizer: str) -> None:
    """The difference in float32 is rounding: float64 shrinks it."""
    actual = _replicated(4, model, optimizer, "float64")
    _check(actual, _plain(model, optimizer, "float64"), 1e-11)


@pytest.mark.parametrize("model", MODELS)
def test_two_runs_are_bitwise_equal(model: str) -> None:
    one, two = (_replicated(4, model, "adam") for _ in range(2))
    assert one.losses.tobytes() == two.losses.tobytes()
    for a, b in zip(
        [*one.weights, *one.slots], [*two.weights, *two.slots], strict=True
    ):
        assert a.tobytes() == b.tobytes()
