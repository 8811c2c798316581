# SPDX-License-Identifier: Apache-2.0
"""Keras models whose own train_step a step per shard would get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

SIGNATURE = [tf.TensorSpec([None, 5]), tf.TensorSpec([None, 3])]


def batches() -> list[list[tf.Tensor]]:
    rng = np.random.default_rng(1)
    return [
        [tf.cast(rng.normal(size=[n, width]), tf.float32) for width in (5, 3)]
        for n in (11, 8, 5, 2)
    ]


class Clipped(keras.Model):
    """Clips by the global norm in its train_step."""

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=False)
        )
        return {"loss": loss, "norm": norm}


class Contrastive(keras.Model):
    """Adds a term across the examples of a batch."""

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.compute_loss(x, y, p)
            loss += 0.1 * ops.mean(ops.logsumexp(p @ ops.transpose(p), 1))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=False)
        )
        worst = ops.max(ops.abs(y - p))
        return {"loss": loss, "rmse": ops.sqrt(loss), "worst": worst}


class PerExample(keras.Model):
    """Differentiates a vector of losses, as some of keras.io's examples do."""

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = keras.losses.mean_absolute_error(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=False)
        )
        return {"loss": ops.mean(loss)}


class Penalized(keras.Model):
    """Adds the norm of a gradient by the examples, as Wasserstein GANs do."""

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                p = self(x, training=True)
            by_x = inner.gradient(p, x)
            norms = tf.sqrt(tf.reduce_sum(by_x**2, 1) + 0.01)
            loss = self.compute_loss(x, y, p) + tf.reduce_mean((norms - 1) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=False)
        )
        return {"loss": loss}


class Measured(keras.Model):
    """Updates metrics in compute_loss, and a Sum of a mean in train_step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.positives = keras.metrics.TruePositives(name="positives")
        self.spread = keras.metrics.Sum(name="spread")
        self.total = keras.metrics.Sum(name="total")

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any
    ) -> Any:
        errors = ops.mean((y - y_pred) ** 2, -1)
        self.positives.update_state(y > 0, ops.sigmoid(y_pred))
        self.spread.update_state(errors)
        return ops.mean(errors)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.total.update_state(ops.mean((self(data[0]) - data[1]) ** 2))
        return {**logs, "total": self.total.result()}


class Memory(layers.Layer):
    """Keeps the last four examples, counts all, and averages a sum over the batch."""

    def build(self, shape: Any) -> None:
        def weight(*shape: int) -> Any:
            return self.add_weight(shape=shape, initializer="zeros", trainable=False)

        self.bank, self.seen, self.average = (
            weight(4, shape[-1]),
            weight(),
            weight(shape[-1]),
        )

    def call(self, x: Any) -> Any:
        self.bank.assign(ops.concatenate([self.bank.value, x])[-4:])
        self.seen.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        self.average.assign(0.9 * self.average + 0.1 * ops.sum(x, 0))
        return x + 0.1 * ops.mean(self.bank)


def _model(
    kind: type[keras.Model],
    *middle: Callable[[], layers.Layer],
    optimizer: str = "sgd",
) -> Any:
    keras.utils.set_random_seed(1)
    x = h = keras.Input((5,))
    for layer in middle:
        h = layer()(h)
    model = kind(x, layers.Dense(3)(h))
    metrics = [keras.metrics.RootMeanSquaredError(), keras.metrics.CosineSimilarity()]
    model.compile(optimizer, "mse", metrics=metrics)
    before = model.get_weights()
    model.train_on_batch(*batches()[0])  # makes variables of optimizer and metrics
    model.set_weights(before)
    for v in [*model.optimizer.variables, *model.metrics_variables]:
        if not v.name.startswith("learning_rate"):
            v.assign(ops.zeros_like(v))
    model.reset_metrics()
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "plain": lambda: _model(keras.Model, optimizer="adam"),
    "BatchNormalization": lambda: _model(keras.Model, layers.BatchNormalization),
    "clipping": lambda: _model(Clipped),
    "term across examples": lambda: _model(Contrastive),
    "a loss per example": lambda: _model(PerExample),
    "a penalty": lambda: _model(Penalized, lambda: layers.Dense(4, "tanh")),
    "metrics in compute_loss": lambda: _model(Measured),
    "memory and counts": lambda: _model(keras.Model, Memory),
    "activity regularizer": lambda: _model(
        keras.Model, lambda: layers.Dense(4, activity_regularizer="l2")
    ),
    "GRU": lambda: _model(
        keras.Model, lambda: layers.Reshape((5, 1)), lambda: layers.GRU(3)
    ),
}


def state(model: Any) -> list[Any]:
    """Returns what a train_step changes."""
    return [
        *model.variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    ]
