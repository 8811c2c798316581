# SPDX-License-Identifier: Apache-2.0
"""AutoDist(..., local_statistics=True): replicas normalize by their own rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from replicator import errors
from tests.autodist import helpers

v1 = tf.compat.v1
SCALE, RATE = [1.0, -2.0, 0.5], 0.1


def images(rows: int) -> np.ndarray:
    random = np.random.default_rng(rows)
    return random.normal(1.0, 2.0, [rows, 2, 2, 3]).astype(np.float32)


def by_fused_ops(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    return v1.nn.fused_batch_norm(x, scale, tf.zeros([3]), is_training=True)[0]


def by_moments(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return tf.nn.batch_normalization(x, mean, variance, None, scale, 1e-3)


def loss_of(y: tf.Tensor, rows: Any) -> tf.Tensor:
    return tf.reduce_sum(tf.sin(y) + y**2) / tf.cast(rows, y.dtype)


def trained(normalize: Any, x: np.ndarray, replicas: int) -> list[np.ndarray]:
    """Returns what a step makes of rows and of the scale, replica by replica."""
    scale, sums, rows = tf.constant(SCALE), [], []
    for part in np.array_split(x, replicas):
        with tf.GradientTape() as tape:
            tape.watch(scale)
            y = normalize(tf.constant(part), scale)
            loss = loss_of(y, len(x))
        sums.append(tape.gradient(loss, scale))
        rows.append(y)
    return [np.concatenate(rows), np.asarray(scale - RATE * tf.add_n(sums))]


NORMALIZED = pytest.mark.parametrize("normalize", [by_fused_ops, by_moments])


@NORMALIZED
def test_sessions(normalize: Any) -> None:
    autodist, x = helpers.make(2, local_statistics=True), images(5)
    with tf.Graph().as_default(), autodist.scope():
        rows = v1.placeholder(tf.float32, [None, 2, 2, 3])
        scale = tf.Variable(SCALE)
        y = normalize(rows, scale)
        loss = loss_of(y, tf.shape(rows)[0])
        train = v1.train.GradientDescentOptimizer(RATE).minimize(loss)
        session = autodist.create_distributed_session()
        made, _ = session.run([y, train], {rows: x})
        found = [made, session.run(scale)]
    for have, want in zip(found, trained(normalize, x, 2), strict=True):
        np.testing.assert_allclose(have, want, 1e-4, 1e-5)


@NORMALIZED
def test_functions(normalize: Any) -> None:
    autodist, x = helpers.make(3, local_statistics=True), images(7)
    with autodist.scope():
        scale = tf.Variable(SCALE)

    @autodist.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = normalize(x, scale)
            loss = loss_of(y, tf.shape(x)[0])
        scale.assign_sub(RATE * tape.gradient(loss, scale))
        return y

    for have, want in zip([step(x), scale], trained(normalize, x, 3), strict=True):
        np.testing.assert_allclose(have, want, 1e-4, 1e-5)


def test_methods() -> None:
    autodist, x = helpers.make(2, local_statistics=True), images(5)

    class Model:
        @autodist.function
        def step(self, x: tf.Tensor) -> tf.Tensor:
            return by_moments(x, tf.constant(SCALE))

    want, _ = trained(by_moments, x, 2)
    np.testing.assert_allclose(Model().step(x), want, 1e-4, 1e-5)


@pytest.mark.parametrize("axis", [-1, 1])  # fused, and by moments
def test_layers_of_legacy_keras(axis: int) -> None:
    autodist, x = helpers.make(2, local_statistics=True), images(5)
    with autodist.scope():
        layer = tf_keras.layers.BatchNormalization(axis=axis, momentum=0.9)
        layer.build(x.shape)
    train = autodist.function(lambda x: layer(x, training=True))
    along = (0, 1, 2) if axis == -1 else (0, 2, 3)
    parts = [x[:3], x[3:]]
    rows = [
        (p - p.mean(along, keepdims=True)) / np.sqrt(p.var(along, keepdims=True) + 1e-3)
        for p in parts
    ]
    np.testing.assert_allclose(train(x), np.concatenate(rows), 1e-3, 1e-4)
    mean = 0.1 * (0.6 * parts[0].mean(along) + 0.4 * parts[1].mean(along))
    np.testing.assert_allclose(layer.moving_mean, mean, 1e-4, 1e-5)


def test_keras_models() -> None:
    autodist, x = helpers.make(2, local_statistics=True), images(5)
    with autodist.scope():
        model = tf.keras.Sequential([tf.keras.layers.BatchNormalization()])
        model.compile("sgd", "mse")
        model.build(x.shape)
    autodist.keras_model(model).fit(x, x, batch_size=5, shuffle=False, verbose=0)
    moved = 0.99 + 0.01 * (0.6 * x[:3].var((0, 1, 2)) + 0.4 * x[3:].var((0, 1, 2)))
    np.testing.assert_allclose(model.layers[0].moving_variance, moved, 1e-5)


def test_what_is_no_boolean_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="AutoDist was given local_stat"):
        helpers.make(1, local_statistics=2)


def test_gradients_of_gradients_are_of_the_whole_batch(caplog: Any) -> None:
    """There TensorFlow computes the statistics of fused ops anew."""

    def step(x: tf.Tensor, scale: tf.Variable) -> tf.Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y, *_ = v1.nn.fused_batch_norm(x * scale, tf.ones(3), tf.zeros(3))
                cubes = tf.reduce_sum(y**3)
            penalty = tf.reduce_sum(tape.gradient(cubes, x) ** 2)
        return outer.gradient(penalty, scale)

    autodist, x = helpers.make(2, local_statistics=True), images(5)
    want = step(tf.constant(x), tf.Variable(SCALE))
    with autodist.scope():
        scale = tf.Variable(SCALE)
    run = autodist.function(lambda x: step(x, scale))
    np.testing.assert_allclose(run(x), want, 1e-2, 1e-3)
    assert "those of the whole batch" in caplog.text
