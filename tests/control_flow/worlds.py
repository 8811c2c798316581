# SPDX-License-Identifier: Apache-2.0
"""One program, run on replicas and by plain TensorFlow on all tensors at once.

A program takes a world and a tensor: of shape [3] on a replica; of shape [replicas, 3],
all replicas' tensors stacked, in the plain world, where it runs eagerly with Python's
conditionals and loops. It computes elementwise; only the world's methods combine
elements and replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

import replicator
from tests import helpers

SIZE = 3


class World(Protocol):
    """The methods by which a program sees beyond its own element."""

    def all_reduce(self, x: tf.Tensor, op: str = "sum") -> tf.Tensor:
        """Reduces over the replicas, elementwise."""

    def gathered(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sum of (k + 1) * x_k over the replicas k, from an all_gather."""

    def first(self, x: tf.Tensor) -> tf.Tensor:
        """Returns replica 0's tensor, from a broadcast."""

    def total(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sum of all elements of all replicas, a scalar."""

    def known(self, value: Any) -> tf.Tensor:
        """Returns a scalar of this value that no graph pass can fold."""


class Plain:
    """All replicas' tensors stacked along axis 0."""

    def all_reduce(self, x: tf.Tensor, op: str = "sum") -> tf.Tensor:
        reduce = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}
        return reduce[op](x, 0, keepdims=True) + tf.zeros_like(x)

    def gathered(self, x: tf.Tensor) -> tf.Tensor:
        factors = tf.range(1, x.shape.as_list()[0] + 1, dtype=x.dtype)
        weighted = x * tf.reshape(factors, [-1] + [1] * (x.shape.rank - 1))
        return self.all_reduce(weighted)

    def first(self, x: tf.Tensor) -> tf.Tensor:
        return x[:1] + tf.zeros_like(x)

    def total(self, x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x)

    def known(self, value: Any) -> tf.Tensor:
        return tf.constant(value)


class Replicas:
    """The replica being built by a Replicator."""

    def __init__(self, repl: replicator.Replicator) -> None:
        self.repl = repl

    def all_reduce(self, x: tf.Tensor, op: str = "sum") -> tf.Tensor:
        return self.repl.all_reduce(x, op)

    def gathered(self, x: tf.Tensor) -> tf.Tensor:
        factors = tf.range(1, self.repl.num_replicas + 1, dtype=x.dtype)
        return tf.tensordot(factors, self.repl.all_gather(x), 1)

    def first(self, x: tf.Tensor) -> tf.Tensor:
        return self.repl.broadcast(x)

    def total(self, x: tf.Tensor) -> tf.Tensor:
        return self.repl.all_reduce(tf.reduce_sum(x))

    def known(self, value: Any) -> tf.Tensor:
        return helpers.opaque(value)


Program = Callable[[Any, tf.Tensor], tf.Tensor]
Target = Callable[[], tuple[tf.Tensor, Any]]  # the differentiated value, and others
Differentiate = Callable[[Target, tf.Tensor], tuple[tf.Tensor, Any]]


def by_tape(target: Target, x: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """Returns the gradient by a tape, and the target's other results."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        value, more = target()
    return tape.gradient(value, x, unconnected_gradients="zero"), more


def by_persistent_tape(target: Target, x: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """Differentiates twice by one tape; the halves add up to the gradient."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        value, more = target()
        value = 0.5 * value
    halves = [tape.gradient(value, x, unconnected_gradients="zero") for _ in range(2)]
    return halves[0] + halves[1], more


def by_tf_gradients(target: Target, x: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """Differentiates by the graph."""
    value, more = target()
    return tf.gradients(value, x, unconnected_gradients="zero")[0], more


def inputs(num_replicas: int, seed: int = 0) -> np.ndarray:
    """Returns the replicas' operands, of shape [num_replicas, SIZE]."""
    return np.random.RandomState(seed).uniform(-1.0, 1.0, [num_replicas, SIZE])


def _derivatives(
    program: Program, world: Any, x: tf.Tensor, factor: Any, by: Differentiate
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the value, the gradient, and the gradient of the gradient's projection.

    The second derivative is a product with a vector that differs by replica.
    """

    def loss() -> tuple[tf.Tensor, Any]:
        y = program(world, x)
        return tf.reduce_sum(factor * tf.sin(y) * y), y

    def slope() -> tuple[tf.Tensor, Any]:
        d, y = by(loss, x)
        return tf.reduce_sum(tf.cos(tf.stop_gradient(x) + factor) * d), (y, d)

    dd, (y, d) = by(slope, x)
    return y, d, dd


def plain(program: Program, num_replicas: int) -> list[np.ndarray]:
    """Returns value, first and second derivative, each of shape [replicas, SIZE]."""
    x = tf.constant(inputs(num_replicas))
    factor = tf.reshape(tf.range(1.0, num_replicas + 1.0, dtype=x.dtype), [-1, 1])
    return [t.numpy() for t in _derivatives(program, Plain(), x, factor, by_tape)]


def replicated(
    program: Program, num_replicas: int, mode: str, by: Differentiate
) -> list[np.ndarray]:
    """Returns the same, computed on replicas."""
    repl = helpers.make(num_replicas)
    world, arrays = Replicas(repl), inputs(num_replicas)

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        r = repl.replica_id
        x = helpers.opaque(arrays[r])
        return _derivatives(program, world, x, r + 1.0, by)

    columns = helpers.run(mode, repl, lambda: step)
    return [np.stack(list(column)) for column in columns]


# How a program runs: number of replicas, mode, and way of differentiation.
WAYS: dict[str, tuple[int, str, Differentiate]] = {
    "eager": (2, "eager", by_tape),
    "function": (2, "function", by_tape),
    "session": (2, "session", by_tf_gradients),
}
MORE_WAYS: dict[str, tuple[int, str, Differentiate]] = {
    "one replica": (1, "function", by_tape),
    "three replicas": (3, "eager", by_tape),
    "persistent tape": (2, "function", by_persistent_tape),
    "tf.gradients in a function": (2, "function", by_tf_gradients),
    "tape in a session": (2, "session", by_tape),
}


def assert_equal(program: Program, way: str) -> None:
    """Asserts that replicas compute plain TensorFlow's values and derivatives."""
    num_replicas, mode, by = {**WAYS, **MORE_WAYS}[way]
    got = replicated(program, num_replicas, mode, by)
    want = plain(program, num_replicas)
    for what, one, two in zip(("value", "d", "dd"), got, want, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-9, err_msg=what)
