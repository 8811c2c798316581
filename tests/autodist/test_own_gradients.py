# SPDX-License-Identifier: Apache-2.0
"""Custom gradients: which of them treat a part of the batch like the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.autodist import own_gradients
from replicator.autodist.kinds import DRAWN, SAME, UNKNOWN, Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.values import Values

v1 = tf.compat.v1


def _passing(back: Callable[..., Any]) -> Callable[[tf.Tensor], tf.Tensor]:
    return tf.custom_gradient(lambda z: (tf.identity(z), lambda d: back(d)))


def _raises(d: tf.Tensor) -> tf.Tensor:
    raise ValueError("not twice")


# Of rows x [n, 3], numbers y [n] and weights w [3].
KEPT: dict[str, Any] = {
    "clipped": lambda x, y, w: _passing(lambda d: tf.clip_by_value(d, -1.0, 1.0))(x),
    "reversed": lambda x, y, w: _passing(lambda d: -0.5 * d)(x * w),
    "by each example": lambda x, y, w: _passing(lambda d: d * y[:, None])(x),
    "norms of rows": lambda x, y, w: _passing(lambda d: tf.clip_by_norm(d, 1.0, [1]))(
        x
    ),
    "reversed of weights": lambda x, y, w: x * _passing(lambda d: -d * w)(w),
    "of TensorFlow": lambda x, y, w: tf.nn.silu(x * w),
    "of a function": lambda x, y, w: tf.function(lambda: tf.nn.silu(x * w))(),
    "none": lambda x, y, w: tf.tanh(x * w),
    "stopped": lambda x, y, w: tf.stop_gradient(_passing(lambda d: d / tf.norm(d))(x)),
}
NOT_KEPT: dict[str, Any] = {
    "over its norm": lambda x, y, w: _passing(lambda d: d / tf.norm(d))(x),
    "less its mean": lambda x, y, w: _passing(lambda d: d - tf.reduce_mean(d, 0))(x),
    "over a sum": lambda x, y, w: _passing(lambda d: d / tf.reduce_sum(y))(x),
    "in a function": lambda x, y, w: tf.function(
        lambda: _passing(lambda d: d / tf.norm(d))(x)
    )(),
    "of weights": lambda x, y, w: x * _passing(lambda d: tf.clip_by_norm(d, 1.0))(w),
    "of weights in a function": lambda x, y, w: (
        x * tf.function(lambda v: _passing(lambda d: d / tf.norm(d))(v))(w)
    ),
    "raises": lambda x, y, w: _passing(_raises)(x),
    "for variables": lambda x, y, w: tf.recompute_grad(lambda z: z * w)(x),
}


def _found(make: Callable[..., tf.Tensor]) -> bool:
    """Whether some gradient is rejected, or the result's Value is unknown."""
    with tf.Graph().as_default() as graph:
        x, y = v1.placeholder(tf.float32, [None, 3]), v1.placeholder(tf.float32, [None])
        w = v1.get_variable("w", [3], use_resource=True)
        result = make(x, y, w)
        values = Values(Program(graph, [w]).flow)
        return values.not_kept([result]) is not None or values.of(result) == UNKNOWN


@pytest.mark.parametrize("name", [*KEPT, *NOT_KEPT])
def test_gradients_that_examples_do_not_share_are_kept(name: str) -> None:
    assert _found({**KEPT, **NOT_KEPT}[name]) is (name in NOT_KEPT)


def test_what_an_override_has_in_the_place_of_a_gradient_is_looked_at() -> None:
    @tf.RegisterGradient("TestOverTheLargest")
    def _(op: tf.Operation, d: tf.Tensor) -> tf.Tensor:
        return d / tf.reduce_max(op.outputs[0])

    def make(x: tf.Tensor, y: tf.Tensor, w: Any) -> tf.Tensor:
        graph = v1.get_default_graph()
        with graph.gradient_override_map({"Relu": "TestOverTheLargest"}):
            return tf.nn.relu(x)

    assert _found(make)


def test_a_gradient_by_a_gradient_is_what_it_was_of() -> None:
    for value in (Value(Kind.ROWS, 0.5, axis=1), Value(Kind.MEAN, 1.0), SAME):
        twice = own_gradients.dual(own_gradients.dual(value))
        assert twice == value.replaced(by_value=True)
    assert own_gradients.dual(DRAWN) == DRAWN
    assert own_gradients.dual(Value(Kind.MAX)) == UNKNOWN


def test_what_calls_functions_is_looked_into() -> None:
    with tf.Graph().as_default():
        result = tf.function(lambda: tf.nn.silu(tf.ones([2])) + tf.tanh(1.0))()
        assert list(own_gradients.between([result + 1.0])) == [result.op]
