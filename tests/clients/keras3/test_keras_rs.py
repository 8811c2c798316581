# SPDX-License-Identifier: Apache-2.0
"""Recommenders of keras-rs, whose tables have sparse gradients."""

from __future__ import annotations

import keras
import keras_rs
import numpy as np
import pytest
import tensorflow as tf

from tests.clients.training import Training, check, ways

RNG = np.random.default_rng(1)
USERS = RNG.integers(0, 9, 12)
MOVIES = RNG.integers(0, 7, 12)
RATINGS = RNG.normal(size=12).astype(np.float32)


def cross_network() -> Training:
    keras.utils.set_random_seed(1)
    users, movies = keras.layers.Embedding(9, 4), keras.layers.Embedding(7, 4)
    cross = [keras_rs.layers.FeatureCross(projection_dim=3) for _ in range(2)]
    head = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])

    def loss(user: tf.Tensor, movie: tf.Tensor, rating: tf.Tensor) -> tf.Tensor:
        x0 = x = tf.concat([users(user), movies(movie)], -1)
        for layer in cross:
            x = layer(x0, x)
        return tf.reduce_mean((head(x)[:, 0] - rating) ** 2)

    layers = [users, movies, *cross, head]
    return Training(
        loss,
        lambda: [v for layer in layers for v in layer.trainable_variables],
        keras.optimizers.Adagrad(0.1),
        (USERS, MOVIES, RATINGS),
    )


def dot_interaction() -> Training:
    keras.utils.set_random_seed(1)
    users, movies = keras.layers.Embedding(9, 4), keras.layers.Embedding(7, 4)
    interaction = keras_rs.layers.DotInteraction()
    head = keras.layers.Dense(1)

    def loss(user: tf.Tensor, movie: tf.Tensor, rating: tf.Tensor) -> tf.Tensor:
        x = interaction([users(user), movies(movie), users(user) * movies(movie)])
        return tf.reduce_mean((head(x)[:, 0] - rating) ** 2)

    layers = [users, movies, head]
    return Training(
        loss,
        lambda: [v for layer in layers for v in layer.trainable_variables],
        keras.optimizers.SGD(0.1),
        (USERS, MOVIES, RATINGS),
    )


@ways
@pytest.mark.parametrize("program", [cross_network, dot_interaction])
def test_equals_one_device(program, replicas, options):
    check(program, replicas, options)
