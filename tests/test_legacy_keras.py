# SPDX-License-Identifier: Apache-2.0
"""Layers, metrics, policies and files of legacy Keras (tf_keras) in a step."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import replicator
from tests import helpers

K = tf_keras
L = K.layers
RNG = np.random.default_rng(3)
IMAGES = RNG.normal(size=[12, 6, 6, 2]).astype(np.float32)
LABELS = RNG.integers(0, 3, size=12)
LOSS = K.losses.SparseCategoricalCrossentropy(from_logits=True)

PROGRAM = """
import os, sys
import tensorflow as tf
import replicator
repl = replicator.Replicator(["CPU:0", "CPU:1"])
K = tf.keras
assert K.Model.__module__.startswith("tf_keras."), K.Model
with repl.context():
    layer = K.layers.Dense(2, input_shape=(3,), kernel_initializer="ones")
    model = K.Sequential([layer])
    optimizer = repl.wrap_optimizer(K.optimizers.Adam(0.5))
    mean = K.metrics.Mean()
x = tf.constant([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
def step_fn():
    own = x[repl.replica_id : repl.replica_id + 1]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(own) ** 2)
    optimizer.minimize(loss, model.trainable_variables, tape=tape)
    mean.update_state(loss)
    return repl.all_reduce(loss, "mean")
first = repl.run(step_fn)
second = repl.run(step_fn)
assert first[0] == first[1] and float(second[0]) < float(first[0])
assert abs(float(mean.result()) - (float(first[0]) + float(second[0])) / 2) < 1e-5
"""


def make_model() -> Any:
    # K.utils.set_random_seed of tf_keras 2.18 fails with Python 3.12.
    kernels = [K.initializers.GlorotUniform(seed) for seed in (1, 2)]
    return K.Sequential(
        [
            K.Input((6, 6, 2)),
            L.Conv2D(3, 3, activation="relu", kernel_initializer=kernels[0]),
            L.BatchNormalization(synchronized=True),
            L.Flatten(),
            L.Dense(3, dtype="float32", kernel_initializer=kernels[1]),
        ]
    )


class Trained:
    """A model in training, on some replicas or (None) without a Replicator."""

    def __init__(self, replicas: int | None, **options: Any) -> None:
        self.repl = helpers.make(replicas, **options) if replicas else None
        with self.repl.context() if self.repl else tf.device(None):
            self.model = make_model()
            optimizer = K.optimizers.Adam(0.05)
            if K.mixed_precision.global_policy().name != "float32":
                optimizer = K.mixed_precision.LossScaleOptimizer(optimizer)
            self.accuracy = K.metrics.SparseCategoricalAccuracy()
            self.optimizer = (
                self.repl.wrap_optimizer(optimizer) if self.repl else optimizer
            )
        self.checkpoint = tf.train.Checkpoint(
            model=self.model, optimizer=self.optimizer, metric=self.accuracy
        )

        def step_fn(batch: Any) -> tf.Tensor:
            images, labels = batch
            with tf.GradientTape() as tape:
                logits = self.model(images, training=True)
                loss = LOSS(labels, logits)
                scaled = loss
                if hasattr(self.optimizer, "get_scaled_loss"):
                    scaled = self.optimizer.get_scaled_loss(loss)
            grads = tape.gradient(scaled, self.model.trainable_variables)
            if hasattr(self.optimizer, "get_unscaled_gradients"):
                grads = self.optimizer.get_unscaled_gradients(grads)
            self.optimizer.apply_gradients(
                zip(grads, self.model.trainable_variables, strict=True)
            )
            self.accuracy.update_state(labels, logits)
            return loss

        def input_fn(ctx: replicator.InputContext) -> Any:
            size = 12 // ctx.num_replicas
            rows = slice(size * ctx.replica_id, size * (ctx.replica_id + 1))
            return lambda: (tf.constant(IMAGES[rows]), tf.constant(LABELS[rows]))

        if self.repl:
            self.step = self.repl.build(step_fn, input_fn)
        else:
            global_batch = tf.constant(IMAGES), tf.constant(LABELS)
            self.step = tf.function(lambda: step_fn(global_batch))

    def train(self, steps: int) -> Trained:
        for _ in range(steps):
            self.step()
        return self

    def weights(self) -> list[np.ndarray]:
        return self.model.get_weights()


def assert_same(one: Trained, other: Trained, tolerance: float = 1e-4) -> None:
    for a, b in zip(one.weights(), other.weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert one.accuracy.result() == other.accuracy.result()
    for trained in (one, other):
        if trained.repl:
            helpers.assert_replicas_equal(
                [*trained.model.variables, *trained.optimizer.variables]
            )


@pytest.mark.battery(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"variables": "sharded"}, {"build": "clone"}],
    ids=str,
)
def test_training_equals_one_device_on_the_whole_batch(options: dict) -> None:
    one, some = Trained(None).train(3), Trained(3, **options).train(3)
    assert_same(one, some)


def test_mixed_precision_equals_one_device() -> None:
    """Layers compute in bfloat16 and keep float32 variables, which cast themselves."""
    K.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        one = Trained(None).train(3)
        some = Trained(2, variables="sharded").train(3)
    finally:
        K.mixed_precision.set_global_policy("float32")
    for a, b in zip(one.weights(), some.weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05)  # bfloat16 has 8 bits


@pytest.mark.parametrize(("source", "target"), [(2, None), (None, 3)])
def test_files_go_from_any_number_of_replicas_to_any(
    source: int | None, target: int | None, tmp_path: pathlib.Path
) -> None:
    old = Trained(source).train(2)
    path = old.checkpoint.write(str(tmp_path / "c"))
    old.model.save_weights(tmp_path / "m.weights.h5")
    old.model.save_weights(tmp_path / "m.h5")
    for name in ("m.weights.h5", "m.h5"):
        new = Trained(target)
        new.model.load_weights(tmp_path / name)
        for a, b in zip(old.weights(), new.weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)  # statistics are means
    new = Trained(target)
    status = new.checkpoint.read(path)  # before the optimizer has any slots
    assert_same(old.train(1), new.train(1))
    status.assert_consumed()


def test_a_saved_model_holds_the_plain_optimizer(tmp_path: pathlib.Path) -> None:
    trained = Trained(2)
    trained.model.compile(trained.optimizer, LOSS)
    trained.train(2)
    trained.model.save(tmp_path / "model.keras")
    loaded = K.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is K.optimizers.Adam
    assert loaded.optimizer.iterations.numpy() == 2
    for a, b in zip(trained.weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_dropout_differs_between_replicas() -> None:
    repl = helpers.make(2)
    with repl.context():
        layers = [L.Dropout(0.5), L.Dropout(0.5, seed=7)]
    x = tf.ones([64])
    for one, two in repl.run(lambda: [layer(x, training=True) for layer in layers]):
        assert np.any(one.numpy() != two.numpy())


@pytest.mark.slow
def test_where_tf_keras_is_tensorflows_keras() -> None:
    """With TF_USE_LEGACY_KERAS=1, in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]


def test_keras_model_names_the_way_that_its_train_step_goes() -> None:
    def compiled(optimizer: Any) -> Any:
        model = K.Sequential([K.Input([2]), L.Dense(3, kernel_initializer="ones")])
        model.compile(optimizer, LOSS)
        return model

    plain = compiled(K.optimizers.SGD(0.1))
    repl = helpers.make(2)
    with repl.context():
        model = compiled(repl.wrap_optimizer(K.optimizers.SGD(0.1)))
    with pytest.raises(replicator.ReplicatorError, match=r"run\(model.train_step"):
        repl.keras_model(model)
    batch = IMAGES[:, 0, 0], LABELS
    plain.train_on_batch(*batch)
    repl.run(model.train_step, batch, input_mode="global_batch")
    for actual, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
