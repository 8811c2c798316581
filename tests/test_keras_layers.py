# SPDX-License-Identifier: Apache-2.0
"""Keras 3 layers, metrics and models in a step.

That training equals that on one device is in tests/programs/training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

K = tf.keras
L = K.layers
BATCH = 12  # global; 2 and 3 replicas divide it


def rows(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=[BATCH, 5]).astype(np.float32)


def dense() -> list[Any]:
    return [L.Dense(4, activation="tanh"), L.Dense(1)]


def build_model(layers: Callable[[], list[Any]], data: np.ndarray) -> K.Model:
    K.utils.set_random_seed(1)
    tf.random.set_seed(None)
    model = K.Sequential([K.Input(data.shape[1:], dtype=str(data.dtype)), *layers()])
    return model


def loss_of(model: K.Model, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(model(x, training=True) ** 2)


def update(model: K.Model, optimizer: Any, x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of(model, x)
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return loss


def shard(repl: replicator.Replicator, data: np.ndarray) -> tf.Tensor:
    """Returns this replica's part of the whole batch."""
    size = len(data) // repl.num_replicas
    return tf.constant(data[repl.replica_id * size : (repl.replica_id + 1) * size])


def mirrored(model: K.Model) -> list[K.Variable]:
    """Returns all variables except the seeds of random generators, which differ."""
    return [v for v in model.variables if "seed_generator" not in v.path]


def trained(
    num_replicas: int,
    data: np.ndarray,
    layers: Callable[[], list[Any]],
    steps: int = 3,
) -> K.Model:
    """Returns the model after some steps."""
    repl = helpers.make(num_replicas)
    with repl.context():
        model = build_model(layers, data)
        optimizer = repl.wrap_optimizer(K.optimizers.Adam(0.05))
    for _ in range(steps):
        repl.run(lambda: update(model, optimizer, shard(repl, data)))
    return model


@pytest.mark.parametrize("mode", helpers.MODES)
def test_batch_norm_averages_the_statistics_of_the_replicas(mode: str) -> None:
    repl = helpers.make(3)
    data = rows(np.random.default_rng(0))

    def make_step() -> Callable[[], Any]:
        layer = L.BatchNormalization(momentum=0.75)
        layer.build([None, 5])

        def step_fn() -> Any:
            layer(shard(repl, data), training=True)
            return layer.moving_mean.value, layer.moving_variance.value

        return step_fn

    means, variances = helpers.run(mode, repl, make_step)
    parts = np.split(data, 3)
    mean = 0.25 * np.mean([part.mean(0) for part in parts], axis=0)
    variance = 0.75 + 0.25 * np.mean([part.var(0) for part in parts], axis=0)
    for r in range(3):
        np.testing.assert_allclose(means[r], mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(variances[r], variance, rtol=1e-5)
        assert np.asarray(means[r]).tobytes() == np.asarray(means[0]).tobytes()


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    "layers",
    [
        lambda: [L.Dense(4), L.BatchNormalization(), L.Dense(1)],
        lambda: [L.Dense(8), L.Dropout(0.5, seed=3), L.Dense(1)],
        lambda: [L.Dense(8), L.AlphaDropout(0.3), L.GaussianNoise(1.0), L.Dense(1)],
        lambda: [L.SpectralNormalization(L.Dense(4)), L.UnitNormalization()],
    ],
    ids=["batch_norm", "dropout", "noise", "spectral_norm"],
)
def test_layers_that_see_their_replica_leave_the_replicas_equal(
    layers: Callable[[], list[Any]],
) -> None:
    data = rows(np.random.default_rng(0))
    repl = helpers.make(2)
    with repl.context():
        model = build_model(layers, data)
        optimizer = repl.wrap_optimizer(K.optimizers.SGD(0.05, momentum=0.9))
    before = [v.numpy() for v in model.trainable_variables]
    for _ in range(3):
        repl.run(lambda: update(model, optimizer, shard(repl, data)))
    helpers.assert_replicas_equal([*mirrored(model), *optimizer.variables])
    for old, new in zip(before, model.trainable_variables, strict=True):
        assert not np.array_equal(old, new.numpy())


def test_layers_are_built_lazily_in_the_step() -> None:
    data = rows(np.random.default_rng(0))
    repl = helpers.make(2)
    model = K.Sequential([L.Dense(4), L.BatchNormalization(), L.Dense(1)])
    with repl.context():
        optimizer = repl.wrap_optimizer(K.optimizers.Adam(0.05))

    def step_fn() -> tf.Tensor:
        return update(model, optimizer, shard(repl, data))

    first = repl.run(step_fn)
    last = [repl.run(step_fn) for _ in range(5)][-1]
    assert len(model.variables) == 8
    assert all(
        isinstance(v.value, replicator.ReplicatedVariable) for v in model.variables
    )
    helpers.assert_replicas_equal([*model.variables, *optimizer.variables])
    assert np.mean(last) < np.mean(first)


def test_inference_outside_uses_the_trained_weights() -> None:
    data = rows(np.random.default_rng(0))
    model = trained(2, data, dense)
    plain = build_model(dense, data)
    plain.set_weights(model.get_weights())
    expected = plain(data).numpy()
    np.testing.assert_array_equal(model(data), expected)
    np.testing.assert_allclose(model.predict(data, verbose=0), expected, rtol=1e-6)


def test_set_weights_reaches_every_replica() -> None:
    data = rows(np.random.default_rng(0))
    model = trained(2, data, dense, steps=1)
    new = [np.full_like(w, 0.5) for w in model.get_weights()]
    model.set_weights(new)
    helpers.assert_replicas_equal(model.variables)
    np.testing.assert_array_equal(helpers.components(model.weights[0])[1], new[0])


# --- Metrics --------------------------------------------------------------------------

METRICS: dict[str, Callable[[], K.metrics.Metric]] = {
    "mean": lambda: K.metrics.Mean(),
    "sum": lambda: K.metrics.Sum(),
    "accuracy": lambda: K.metrics.SparseCategoricalAccuracy(),
    "top_k": lambda: K.metrics.SparseTopKCategoricalAccuracy(2),
    "mse": lambda: K.metrics.MeanSquaredError(),
    "auc": lambda: K.metrics.AUC(),
    "precision": lambda: K.metrics.Precision(),
    "iou": lambda: K.metrics.BinaryIoU(),
}


def arguments(name: str, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns the arguments of the metric's update_state for the whole batch."""
    if name in ("mean", "sum"):
        return [rng.uniform(size=BATCH).astype(np.float32)]
    if name in ("accuracy", "top_k"):
        scores = rng.uniform(size=[BATCH, 4]).astype(np.float32)
        return [rng.integers(0, 4, size=[BATCH, 1]), scores]
    labels = rng.integers(0, 2, size=[BATCH, 1])
    return [labels, rng.uniform(size=[BATCH, 1]).astype(np.float32)]


@pytest.mark.battery(5)
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_those_of_the_whole_data(name: str, num_replicas: int) -> None:
    repl = helpers.make(num_replicas)
    with repl.context():
        metric = METRICS[name]()
    plain = METRICS[name]()
    batches = [arguments(name, np.random.default_rng(k)) for k in range(2)]

    def step_for(batch: list[np.ndarray]) -> Callable[[], None]:
        return lambda: metric.update_state(*(shard(repl, part) for part in batch))

    for batch in batches:
        repl.run(step_for(batch))
        plain.update_state(*batch)
        np.testing.assert_allclose(metric.result(), plain.result(), rtol=1e-6)
        in_graph = tf.function(metric.result)()
        np.testing.assert_allclose(in_graph, plain.result(), rtol=1e-6)
    metric.reset_state()
    plain.reset_state()
    np.testing.assert_allclose(metric.result(), plain.result())
    for variable in metric.variables:
        assert not np.any(helpers.components(variable))
    repl.run(step_for(batches[1]))
    plain.update_state(*batches[1])
    np.testing.assert_allclose(metric.result(), plain.result(), rtol=1e-6)
    metric.update_state(*batches[0])  # outside of a step: once, not once per replica
    plain.update_state(*batches[0])
    np.testing.assert_allclose(metric.result(), plain.result(), rtol=1e-6)


def test_metrics_made_outside_are_refused() -> None:
    repl = helpers.make(2)
    metric = K.metrics.Mean()

    def step_fn() -> None:
        metric.update_state([1.0])

    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)created outside the context.*test_keras_layers.py:\d+ in step_fn",
    ):
        repl.run(step_fn)
    assert float(metric.result()) == 0.0


# --- Several steps over the same variables --------------------------------------------


def test_evaluation_runs_beside_training() -> None:
    data = rows(np.random.default_rng(0))
    repl = helpers.make(2)
    with repl.context():
        model = build_model(lambda: [L.Dense(4), L.BatchNormalization()], data)
        optimizer = repl.wrap_optimizer(K.optimizers.SGD(0.05))
        metric = K.metrics.MeanSquaredError()

    def train() -> tf.Tensor:
        return update(model, optimizer, shard(repl, data))

    def evaluate() -> None:
        outputs = model(shard(repl, data), training=False)
        metric.update_state(tf.zeros_like(outputs), outputs)

    for _ in range(3):
        repl.run(train)
        before = model.get_weights()
        metric.reset_state()
        repl.run(evaluate)
        expected = np.mean(model(data, training=False).numpy() ** 2)
        np.testing.assert_allclose(metric.result(), expected, rtol=1e-5)
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(old, new)
    helpers.assert_replicas_equal(model.variables)


def adversaries(repl: Any, data: np.ndarray, wrap: Callable[[Any], Any]) -> Any:
    """Returns a GAN's two steps and its two models."""
    K.utils.set_random_seed(1)
    generator = K.Sequential([K.Input([5]), L.Dense(4, "tanh"), L.Dense(5)])
    critic = K.Sequential([K.Input([5]), L.Dense(4, "tanh"), L.Dense(1)])
    optimizers = [wrap(K.optimizers.Adam(0.02)) for _ in range(2)]

    def losses(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        real, fake = critic(x), critic(generator(x * 0.5))
        return tf.reduce_mean((fake - 1) ** 2), tf.reduce_mean(
            real**2 + (fake + 1) ** 2
        )

    def step_for(k: int, model: K.Model) -> Callable[[], None]:
        def step_fn() -> None:
            x = shard(repl, data) if repl else tf.constant(data)
            with tf.GradientTape() as tape:
                loss = losses(x)[k]
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizers[k].apply_gradients(zip(gradients, variables, strict=True))

        return step_fn

    return [step_for(0, generator), step_for(1, critic)], [generator, critic]


def test_two_steps_train_two_models_against_each_other() -> None:
    data = rows(np.random.default_rng(0))
    repl = helpers.make(2)
    with repl.context():
        steps, models = adversaries(repl, data, repl.wrap_optimizer)
    for _ in range(3):
        for step in steps:
            repl.run(step)
    plain_steps, plain_models = adversaries(None, data, lambda optimizer: optimizer)
    compiled = [tf.function(step) for step in plain_steps]
    for _ in range(3):
        for step in compiled:
            step()
    for model, plain in zip(models, plain_models, strict=True):
        helpers.assert_replicas_equal(model.variables)
        for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
