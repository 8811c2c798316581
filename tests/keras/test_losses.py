# SPDX-License-Identifier: Apache-2.0
"""Losses of any kind are those of the whole batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras import worlds
from tests.keras.worlds import World, check, labels, numbers

layers = keras.layers
X, Y = numbers(0, 17, 8), numbers(1, 17, 3)


def _fit(world: World, make: Any, x: Any = X, y: Any = Y, **options: Any) -> Any:
    model = world.made(make)
    fit = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0} | options
    history = model.fit(x, y, **fit).history
    return history, model.evaluate(x, y, 7, verbose=0), model.get_weights()


def _sum_of_squares(y: Any, y_pred: Any) -> Any:
    return tf.reduce_sum((y - y_pred) ** 2)


def _contrastive(y: Any, y_pred: Any) -> Any:
    """Compares each example with all others of its batch."""
    likeness = tf.matmul(y_pred, y, transpose_b=True)
    return keras.losses.sparse_categorical_crossentropy(
        tf.range(tf.shape(y)[0]), likeness, from_logits=True
    )


class _Quantile(keras.losses.Loss):
    def call(self, y: Any, y_pred: Any) -> Any:
        error = y - y_pred
        return tf.reduce_mean(tf.maximum(0.3 * error, -0.7 * error), -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        "mse",
        keras.losses.Huber(),
        keras.losses.MeanSquaredError(reduction="sum"),
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        keras.losses.Dice(),
        _sum_of_squares,
        _contrastive,
        _Quantile(),
    ],
    ids=["str", "mean", "sum", "weighted", "across", "function", "contrastive", "own"],
)
def test_losses(loss: Any) -> None:
    def make() -> keras.Model:
        model = worlds.mlp()
        model.compile(keras.optimizers.SGD(0.01), loss)
        return model

    weights = np.linspace(0.1, 2.0, 17)
    check(lambda world: _fit(world, make, sample_weight=weights), [2])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_masks(reduction: str) -> None:
    x = np.array([[1 + k if k < 1 + i % 5 else 0 for k in range(5)] for i in range(17)])
    y = labels(2, 17 * 5, 4).reshape(17, 5)

    def make() -> keras.Model:
        model = keras.Sequential(
            [
                layers.Embedding(7, 4, mask_zero=True),
                layers.SimpleRNN(4, return_sequences=True),
                layers.Dense(4, activation="softmax"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
        return model

    check(lambda world: _fit(world, make, x, y), [2, 3])


def test_several_losses_are_counted_one_by_one() -> None:
    def make() -> keras.Model:
        inputs = layers.Input((8,))
        model = keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(2)(inputs)])
        model.compile(keras.optimizers.SGD(0.05), ["mse", "mae"], loss_weights=[1, 0.2])
        return model

    check(lambda world: _fit(world, make, X, [Y, numbers(5, 17, 2)]), [2])


class Flat(keras.Model):
    """Returns a number per example, of shape [examples]."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1, "sigmoid")

    def call(self, x: Any) -> Any:
        return tf.squeeze(self.dense(x), -1)


@pytest.mark.parametrize("loss", ["mse", "kl_divergence"])
def test_numbers_per_example_are_reduced_over_the_batch(loss: str) -> None:
    def make() -> keras.Model:
        model = Flat()
        # Keras reduces the last axis, which here is the batch.
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=["mae", "accuracy"])
        return model

    y, weights = labels(2, 17, 2).astype("float32"), numbers(3, 17) ** 2
    check(lambda world: _fit(world, make, X, y, sample_weight=weights), [2])


@pytest.mark.slow
def test_regularization_and_added_losses_count_once() -> None:
    class Added(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * tf.reduce_mean(x**2))
            return x

    def make() -> keras.Model:
        model = keras.Sequential(
            [
                layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1"),
                Added(),
                layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    check(lambda world: _fit(world, make), [2, 3])


@pytest.mark.slow
def test_a_model_may_compute_its_loss() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def compute_loss(
            self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True
        ) -> Any:
            spread = tf.math.reduce_std(y_pred) + tf.reduce_max(x)
            return tf.reduce_sum((y - y_pred) ** 2) * self.scale + spread

    def make() -> keras.Model:
        model = Own()
        model.compile(keras.optimizers.SGD(0.001))
        return model

    check(lambda world: _fit(world, make), [2, 3])
