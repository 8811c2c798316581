# SPDX-License-Identifier: Apache-2.0
"""The places of a graph at which `benchmarks.anywhere` communicates.

Each place takes a call that communicates and a replica's operand, and returns a scalar;
the place "gradient" returns the gradient of one. `plain` computes the same for all
replicas at once, in plain TensorFlow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

Call = Callable[[tf.Tensor], tf.Tensor | None]
# Maps all replicas' operands to all replicas' results.
Plain = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor | None]]
Link = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Place:
    """A place of the graph.

    Attributes:
        run: Communicates there; takes the call, the operand and the function that links
            a loss to all messages sent.
        plain: Computes each replica's expected result.
    """

    run: Callable[[Call, tf.Tensor, Link], tf.Tensor]
    plain: Callable[[Plain, Iterable[tf.Tensor]], list[tf.Tensor]]


def _loss(result: tf.Tensor | None) -> tf.Tensor:
    """Returns a scalar that depends on every entry; 0 where nothing was received."""
    if result is None:
        return tf.zeros([], tf.float64)
    return tf.reduce_sum(result * result)


def _top(call: Call, x: tf.Tensor, link: Link) -> tf.Tensor:
    return _loss(call(x))


def _cond(call: Call, x: tf.Tensor, link: Link) -> tf.Tensor:
    return tf.cond(
        tf.reduce_sum(x) > 0, lambda: _loss(call(x)), lambda: tf.reduce_sum(x)
    )


def _while(call: Call, x: tf.Tensor, link: Link) -> tf.Tensor:
    def turn(n: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return n + 1, total + _loss(call(x + tf.cast(n, x.dtype)))

    start = (tf.constant(0), tf.zeros([], x.dtype))
    return tf.while_loop(lambda n, total: n < 2, turn, start)[1]


def _nested(call: Call, x: tf.Tensor, link: Link) -> tf.Tensor:
    return tf.function(lambda x: _loss(call(x)))(x)


def _map_fn(call: Call, x: tf.Tensor, link: Link) -> tf.Tensor:
    return tf.reduce_sum(tf.map_fn(lambda x: _loss(call(x)), tf.stack([x, x + 1])))


def _gradient(call: Call, x: tf.Tensor, link: Link) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = link(_loss(call(x)))
    return tape.gradient(loss, x, unconnected_gradients="zero")


def _plain_once(plain: Plain, xs: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    return [_loss(result) for result in plain(list(xs))]


def _plain_twice(plain: Plain, xs: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    xs = list(xs)
    twice = zip(
        _plain_once(plain, xs), _plain_once(plain, [x + 1 for x in xs]), strict=True
    )
    return [first + second for first, second in twice]


def _plain_gradient(plain: Plain, xs: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    xs = list(xs)
    with tf.GradientTape() as tape:
        tape.watch(xs)
        loss = tf.add_n(_plain_once(plain, xs))
    return tape.gradient(loss, xs, unconnected_gradients="zero")


PLACES = {
    "top level": Place(_top, _plain_once),
    "cond": Place(_cond, _plain_once),
    "while": Place(_while, _plain_twice),
    "nested function": Place(_nested, _plain_once),
    "map_fn": Place(_map_fn, _plain_twice),
    "gradient": Place(_gradient, _plain_gradient),
}
