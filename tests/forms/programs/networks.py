# SPDX-License-Identifier: Apache-2.0
"""Networks of six kinds and their training steps, written for one device."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

v1 = tf.compat.v1
ROWS = 200  # of the embedding's table
# Adam's own epsilon, 1e-7, multiplies rounding: one device whose rows are permuted
# differs from itself by 5e-2.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
}
# For sparse gradients, and updates by one op.
MORE_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "v1 Adam": lambda: v1.train.AdamOptimizer(0.01, epsilon=1e-3),
    "legacy SGD": lambda: tf_keras.optimizers.legacy.SGD(0.05, momentum=0.9),
    "legacy Adam": lambda: tf_keras.optimizers.legacy.Adam(0.01, epsilon=1e-3),
}
Variables = dict[str, Any]


class Network:
    """A network whose variables are made where they are first asked for.

    Attributes:
        variables: By name.
    """

    def __init__(self) -> None:
        self.variables: Variables = {}

    def weight(self, name: str, *shape: int) -> Any:
        """Returns a variable whose initial values follow from its name."""
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        scale = 1 / np.sqrt(np.prod(shape[:-1]))
        return self._variable(name, rng.normal(0, scale, shape))

    def vector(self, name: str, size: int, value: float = 0) -> Any:
        return self._variable(name, np.full(size, value))

    def _variable(self, name: str, value: np.ndarray) -> Any:
        if name not in self.variables:
            with tf.init_scope():
                initial = value.astype(np.float32)
                made = tf.Variable(initial, name=name.replace("/", "_"))
            self.variables[name] = made
        return self.variables[name]

    def dense(self, x: tf.Tensor, units: int, name: str) -> tf.Tensor:
        kernel = self.weight(name, x.shape[-1], units)
        return tf.tensordot(x, kernel, 1) + self.vector(f"{name}/bias", units)


def mlp(net: Network, x: tf.Tensor, units: tuple[int, ...] = (16, 16)) -> tf.Tensor:
    for k, size in enumerate(units):
        x = tf.nn.relu(net.dense(x, size, f"hidden{k}"))
    return net.dense(x, 10, "logits")


def convnet(net: Network, x: tf.Tensor) -> tf.Tensor:
    """A residual block with batch normalization, whose averages are kept."""

    def block(x: tf.Tensor, name: str, channels: int) -> tf.Tensor:
        kernel = net.weight(name, 3, 3, x.shape[-1], channels)
        x = tf.nn.conv2d(x, kernel, 1, "SAME")
        scale = net.vector(f"{name}/scale", channels, 1)
        offset = net.vector(f"{name}/offset", channels)
        x, mean, _ = v1.nn.fused_batch_norm(x, scale, offset)
        average = net.vector(f"{name}/average", channels)
        average.assign_sub(0.1 * (average - mean))
        return tf.nn.relu(x)

    x = block(x, "first", 4)
    x += block(block(x, "second", 4), "third", 4)
    return net.dense(tf.reduce_mean(x, [1, 2]), 10, "logits")


def lstm(net: Network, x: tf.Tensor, units: int = 8) -> tf.Tensor:
    kernel = net.weight("kernel", x.shape[-1] + units, 4 * units)
    times, zeros = tf.transpose(x, [1, 0, 2]), tf.zeros([tf.shape(x)[0], units])

    def turn(t: tf.Tensor, c: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, ...]:
        i, f, o, g = tf.split(tf.concat([times[t], h], 1) @ kernel, 4, 1)
        c = tf.sigmoid(f + 1) * c + tf.sigmoid(i) * tf.tanh(g)
        return t + 1, c, tf.sigmoid(o) * tf.tanh(c)

    last = tf.while_loop(lambda t, *_: t < x.shape[1], turn, (0, zeros, zeros))[2]
    return net.dense(last, 10, "logits")


def transformer(net: Network, x: tf.Tensor, heads: int = 2) -> tf.Tensor:
    def normal(x: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5)

    size, length = x.shape[-1], x.shape[1]

    def apart(y):
        return tf.reshape(y, [-1, length, heads, size // heads])

    names = ("query", "key", "value")
    q, k, v = (apart(net.dense(normal(x), size, name)) for name in names)
    scores = tf.nn.softmax(tf.einsum("nqhd,nkhd->nhqk", q, k) / np.sqrt(size // heads))
    joined = tf.reshape(tf.einsum("nhqk,nkhd->nqhd", scores, v), [-1, length, size])
    x += net.dense(joined, size, "joined")
    wide = tf.nn.gelu(net.dense(normal(x), 4 * size, "wide"))
    x += net.dense(wide, size, "narrow")
    return net.dense(tf.reduce_mean(normal(x), 1), 10, "logits")


def embedding(net: Network, ids: tf.Tensor) -> tf.Tensor:
    rows = tf.nn.embedding_lookup(net.weight("table", ROWS, 8), ids)
    return mlp(net, tf.reduce_mean(rows, 1), (8,))


NETWORKS: dict[str, tuple[list[int], Any]] = {
    "MLP": ([6], mlp),
    "convnet": ([6, 6, 3], convnet),
    "LSTM": ([5, 4], lstm),
    "transformer": ([4, 8], transformer),
    "embedding": ([4], embedding),
}


def signature(name: str) -> list[tf.TensorSpec]:
    dtype = tf.int32 if name == "embedding" else tf.float32
    shape = [None, *NETWORKS[name][0]]
    return [tf.TensorSpec(shape, dtype), tf.TensorSpec([None], tf.int32)]


def batch(name: str, n: int) -> list[tf.Tensor]:
    """Returns n random examples."""
    rng, shape = np.random.default_rng(n), [n, *NETWORKS[name][0]]
    ids = name == "embedding"
    x = rng.integers(0, ROWS, shape) if ids else rng.normal(size=shape)
    specs = signature(name)
    arrays = (x, rng.integers(0, 10, n))
    return [tf.cast(a, s.dtype) for a, s in zip(arrays, specs, strict=True)]


class Training:
    """A network, its optimizer, and a step of it; all variables exist.

    Attributes:
        state: What a step changes.
    """

    def __init__(self, name: str, optimizer: str) -> None:
        self._network, self._build = Network(), NETWORKS[name][1]
        traced = tf.function(lambda x: self._build(self._network, x), autograph=False)
        traced.get_concrete_function(signature(name)[0])
        variables = self._network.variables
        self._trained = [v for k, v in variables.items() if not k.endswith("average")]
        self._optimizer = {**OPTIMIZERS, **MORE_OPTIMIZERS}[optimizer]()
        for method in ("build", "_create_all_weights", "_create_slots"):
            if hasattr(self._optimizer, method):
                getattr(self._optimizer, method)(self._trained)
                break
        slots = self._optimizer.variables
        self.state = [*variables.values(), *(slots() if callable(slots) else slots)]

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = self._build(self._network, x)
            cross = tf.nn.sparse_softmax_cross_entropy_with_logits
            loss = tf.reduce_mean(cross(labels=y, logits=logits))
        gradients = tape.gradient(loss, self._trained)
        self._optimizer.apply_gradients(zip(gradients, self._trained, strict=True))
        return loss
