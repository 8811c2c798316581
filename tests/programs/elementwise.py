# SPDX-License-Identifier: Apache-2.0
"""Programs that also run in plain TensorFlow, on all replicas' tensors at once.

A function under the decorator `elementwise` takes a world and a tensor: of shape [3] on
a replica; of shape [replicas, 3], all replicas' tensors stacked, in the plain world,
where it runs eagerly with Python's conditionals and loops. It computes elementwise;
only the world's methods combine elements and replicas. The program's results are the
value and its derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

import replicator
from tests import helpers
from tests.programs.program import Program, Step, add

_SIZE = 3


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

    def weighted(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the mean, in which replica k weighs k + 1."""

    def shifted(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the previous replica's tensor."""

    def sent(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the same, by messages."""

    def scattered(self, x: tf.Tensor) -> tf.Tensor:
        """Returns k + 1 times the sum, on replica k, from a reduce_scatter."""

    def exchanged(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the same, from an all_to_all."""

    def by_parity(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the even replicas, or of the odd ones."""


class Plain:
    """All replicas' tensors stacked along axis 0."""

    def linked(self, loss: tf.Tensor) -> tf.Tensor:
        return loss

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

    def weighted(self, x: tf.Tensor) -> tf.Tensor:
        count = x.shape.as_list()[0]
        return self.gathered(x) / (count * (count + 1) / 2)

    def shifted(self, x: tf.Tensor) -> tf.Tensor:
        return tf.roll(x, 1, 0)

    sent = shifted

    def scattered(self, x: tf.Tensor) -> tf.Tensor:
        factors = tf.range(1, x.shape.as_list()[0] + 1, dtype=x.dtype)
        return self.all_reduce(x) * factors[:, None]

    exchanged = scattered

    def by_parity(self, x: tf.Tensor) -> tf.Tensor:
        even = tf.range(tf.shape(x)[0])[:, None] % 2 == 0
        zeros = tf.zeros_like(x)
        sums = [self.all_reduce(tf.where(chosen, x, zeros)) for chosen in (even, ~even)]
        return tf.where(even, *sums)


class Replicas:
    """The replica being built by a Replicator."""

    def __init__(self, repl: replicator.Replicator) -> None:
        self.repl, self._sends = repl, False

    def linked(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns a loss that depends on what the replica has sent, if it has."""
        return self.repl.linked(loss) if self._sends else loss

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

    def weighted(self, x: tf.Tensor) -> tf.Tensor:
        return self.repl.all_reduce(x, "mean", weight=self.repl.replica_id + 1)

    def shifted(self, x: tf.Tensor) -> tf.Tensor:
        return self.repl.shift(x, 1)

    def sent(self, x: tf.Tensor) -> tf.Tensor:
        r, count = self.repl.replica_id, self.repl.num_replicas
        if count == 1:
            return x
        self._sends = True
        self.repl.send(x, (r + 1) % count)
        return self.repl.recv(x, (r - 1) % count)

    def _multiples(self, x: tf.Tensor) -> tf.Tensor:
        return tf.stack([x * (k + 1) for k in range(self.repl.num_replicas)])

    def scattered(self, x: tf.Tensor) -> tf.Tensor:
        return self.repl.reduce_scatter(self._multiples(x))[0]

    def exchanged(self, x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self.repl.all_to_all(self._multiples(x), 0, 0), 0)

    def by_parity(self, x: tf.Tensor) -> tf.Tensor:
        everyone = range(self.repl.num_replicas)
        parts = [part for part in (everyone[::2], everyone[1::2]) if part]
        return self.repl.all_reduce(x, group=self.repl.groups(parts))


Function = Callable[[Any, tf.Tensor], tf.Tensor]
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


def _derivatives(
    function: Function,
    world: Any,
    x: tf.Tensor,
    factor: Any,
    by: Differentiate,
    order: int,
) -> tuple[tf.Tensor, ...]:
    """Returns the value, the gradient, and the gradient of the gradient's projection.

    The second derivative is a product with a vector that differs by replica.
    """

    def loss() -> tuple[tf.Tensor, Any]:
        y = function(world, x)
        return world.linked(tf.reduce_sum(factor * tf.sin(y) * y)), y

    def slope() -> tuple[tf.Tensor, Any]:
        d, y = by(loss, x)
        along = tf.cos(tf.stop_gradient(x) + factor)
        return world.linked(tf.reduce_sum(along * d)), (y, d)

    if order == 1:
        return by(loss, x)
    dd, (y, d) = by(slope, x)
    return y, d, dd


def _values(replicas: int) -> np.ndarray:
    """Returns the replicas' operands, of shape [replicas, _SIZE]."""
    return np.random.RandomState(0).uniform(-1.0, 1.0, [replicas, _SIZE])


def _inputs(ctx: replicator.InputContext) -> tuple[tf.Tensor, tf.Tensor]:
    """Gives a replica its operand, and its factor in the loss."""
    factor = tf.constant(ctx.replica_id + 1.0, tf.float64)
    return tf.constant(_values(ctx.num_replicas)[ctx.replica_id]), factor


def as_program(
    function: Function,
    *tags: str,
    by: Differentiate = by_tape,
    order: int = 2,
    name: str = "",
) -> Program:
    """Returns the program of a function; see `elementwise`."""

    def expected(replicas: int) -> tuple[tf.Tensor, ...]:
        factors = tf.reshape(tf.range(1.0, replicas + 1.0, dtype="float64"), [-1, 1])
        x = tf.constant(_values(replicas))
        return _derivatives(function, Plain(), x, factors, by_tape, order)

    def make(repl: replicator.Replicator) -> Step:
        world = Replicas(repl)

        def step(inputs: tuple[tf.Tensor, tf.Tensor]) -> Any:
            return _derivatives(function, world, *inputs, by, order)

        return step

    title = name or function.__name__.strip("_")
    simple = (
        None if order == 1 else as_program(function, *tags, by=by, order=1, name=name)
    )
    return Program(title, make, expected, _inputs, tags=tags, first=simple)


def elementwise(
    *tags: str, by: Differentiate = by_tape, order: int = 2, name: str = ""
) -> Callable[[Function], Function]:
    """Adds a program to the catalogue.

    Args:
        *tags: As of `program`.
        by: How it is differentiated.
        order: How often.
        name: Its name, by default that of the function.
    """

    def register(function: Function) -> Function:
        add(as_program(function, *tags, by=by, order=order, name=name))
        return function

    return register
