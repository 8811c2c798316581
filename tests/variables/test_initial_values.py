# SPDX-License-Identifier: Apache-2.0
"""Parts are initialized with slices of the whole initial value, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from replicator.graph.passes.rows import Parts
from replicator.variables import initial_values
from tests.variables import parted

I = keras.initializers  # noqa: E741  as in the others' documentation

SEED = [1, 2]
VALUES: dict[str, Callable[..., Any]] = {
    "zeros": I.Zeros(),
    "constant": I.Constant(3.0),
    "uniform": I.RandomUniform(-0.05, 0.05, seed=3),
    "normal": I.RandomNormal(seed=1),
    "truncated normal": I.TruncatedNormal(seed=1),
    "Glorot": I.GlorotUniform(seed=2),
    "He": I.HeNormal(seed=2),
    "orthogonal": I.Orthogonal(seed=1),
    "tf_keras": tf_keras.initializers.RandomUniform(-0.05, 0.05, seed=1),
    "stateless uniform": lambda shape, dtype: tf.random.stateless_uniform(
        shape, SEED, dtype=dtype
    ),
    "stateless normal": lambda shape, dtype: tf.random.stateless_normal(
        shape, SEED, 0.0, 2.0, dtype=dtype
    ),
    "stateless truncated normal": lambda shape, dtype: (
        tf.random.stateless_truncated_normal(shape, SEED, dtype=dtype)
    ),
    "stateless gamma": lambda shape, dtype: tf.cast(
        tf.random.stateless_gamma(shape, SEED, alpha=2.0), dtype
    ),
    "integers": lambda shape, dtype: tf.cast(
        tf.random.stateless_uniform(shape, SEED, 0, 9, tf.int32), dtype
    ),
    "a broadcast row": lambda shape, dtype: (
        tf.random.stateless_normal(shape[1:], SEED, dtype=dtype) + tf.ones(shape, dtype)
    ),
    "of NumPy": lambda shape, dtype: np.arange(np.prod(shape)).reshape(shape) * 1.0,
}
DTYPES = (tf.float64, tf.float32, tf.float16, tf.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", VALUES)
def test_parts_are_slices_of_the_whole(name: str, dtype: tf.DType) -> None:
    if name == "orthogonal" and dtype.size < 4:
        pytest.skip("TensorFlow has no QR decomposition of this dtype")
    for shape in [(9, 4), (300, 7), (7, 5, 3)]:
        whole = tf.cast(VALUES[name](shape, dtype=dtype.name), dtype).numpy()
        for axis in range(2):
            drawn = initial_values.pieces(
                lambda shape=shape: VALUES[name](shape, dtype=dtype.name),
                *(dtype, Parts(axis, (2, 1, shape[axis] - 3))),
            )
            parts = np.split(whole, [2, 3], axis)
            for piece, expected in zip(drawn, parts, strict=True):
                assert piece().dtype == dtype
                np.testing.assert_array_equal(piece(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_variables_in_parts_begin_as_whole_ones(dtype: tf.DType) -> None:
    def values(repl: Any) -> list[np.ndarray]:
        tf.random.set_seed(5)
        with repl.context():
            drawn = [
                tf.Variable(lambda draw=draw: draw([10, 3], dtype=dtype), dtype=dtype)
                for draw in (tf.random.uniform, tf.random.normal)
            ]
            drawn.append(tf.Variable(lambda: I.HeNormal(seed=2)([10, 3], dtype.name)))
        return [v.numpy() for v in drawn]

    whole = values(parted.one_device())
    for axis in (0, 1):
        parts = values(parted.replicas(2, parted.InParts(2, axis)))
        for own, expected in zip(parts, whole, strict=True):
            np.testing.assert_array_equal(own, expected)


def test_a_value_is_drawn_once() -> None:
    count = []

    def initial_value() -> tf.Tensor:
        if tf.executing_eagerly():
            count.append(1)
        return tf.linalg.qr(tf.random.uniform([6, 6]))[0]

    pieces = initial_values.pieces(initial_value, tf.float32, Parts(0, (1, 5)))
    whole = np.concatenate([piece() for piece in pieces])
    np.testing.assert_allclose(whole @ whole.T, np.eye(6), atol=1e-5)
    assert count == [1]


def test_a_generator_in_python_is_asked_once() -> None:
    def values(repl: Any) -> list[np.ndarray]:
        random = np.random.RandomState(0)
        with repl.context():
            variables = [tf.Variable(lambda: random.randn(6, 2)) for _ in range(2)]
        return [v.numpy() for v in variables]

    random = np.random.RandomState(0)
    for value in values(parted.replicas(2)):
        np.testing.assert_allclose(value, random.randn(6, 2))


def test_layers_begin_as_without_parts() -> None:
    def weights(repl: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(7)
        with repl.context():
            model = keras.Sequential(
                [
                    keras.layers.Input([3]),
                    keras.layers.Embedding(9, 6),
                    keras.layers.LSTM(4),
                    keras.layers.Dense(5, kernel_initializer="truncated_normal"),
                ]
            )
        return [np.array(w) for w in model.get_weights()]

    for axis in (0, 1):
        actual = weights(parted.replicas(2, parted.InParts(2, axis)))
        for own, expected in zip(actual, weights(parted.one_device()), strict=True):
            np.testing.assert_array_equal(own, expected)


def test_a_graph_draws_the_whole_once() -> None:
    with tf.Graph().as_default():
        repl = parted.replicas(2)
        with repl.context():
            v = tf.Variable(tf.random.uniform([6, 3]))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            value = session.run(v)
            assert len(np.unique(value)) == 18
            for part, own in zip(v.parts, np.split(value, [1, 2]), strict=True):
                np.testing.assert_array_equal(session.run(part.read_value()), own)
