# SPDX-License-Identifier: Apache-2.0
"""Every primitive and its first two derivatives equal plain TensorFlow's.

The differentiated value is the sum of all replicas' losses. The reference computes it
from all tensors at once, without any of our code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.conformance.battery import CASES, DISTINCT

# Takes a function that returns a tensor and one that returns its loss, and x; returns
# the tensor, the gradient of the loss, and that of the slope along a direction.
Slope = Callable[[tf.Tensor], tf.Tensor]
Differentiate = Callable[
    [Callable[[], tf.Tensor], Callable[[tf.Tensor], tf.Tensor], Slope, Any], Any
]


def _by_tape(call: Any, loss: Any, slope: Slope, x: Any) -> tuple[Any, Any, Any]:
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = call()
            value = loss(y)
        first = inner.gradient(value, x, unconnected_gradients="zero")
        steepness = slope(first)
    return y, first, outer.gradient(steepness, x, unconnected_gradients="zero")


def _by_tf_gradients(call: Any, loss: Any, slope: Slope, x: Any) -> Any:
    y = call()
    (first,) = tf.gradients(loss(y), [x], unconnected_gradients="zero")
    (second,) = tf.gradients(slope(first), [x], unconnected_gradients="zero")
    return y, first, second


def _loss(y: tf.Tensor, r: int) -> tf.Tensor:
    return (r + 1.0) * tf.reduce_sum(tf.sin(y) * y)


def _direction(x: tf.Tensor, r: int) -> tf.Tensor:
    """Makes the second derivative a product with a vector that differs by replica."""
    return tf.cos(tf.stop_gradient(x) + r)


def _along(firsts: Sequence[tf.Tensor], xs: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(
        [
            tf.reduce_sum(_direction(x, r) * d)
            for r, (x, d) in enumerate(zip(xs, firsts, strict=True))
        ]
    )


def _reference(name: str, arrays: Sequence[np.ndarray]) -> list[tuple[Any, Any, Any]]:
    """Returns result, first and second derivative for each replica."""
    xs = [tf.constant(array) for array in arrays]
    columns = _by_tape(
        lambda: CASES[name].plain(xs),
        lambda ys: tf.add_n([_loss(y, r) for r, y in enumerate(ys)]),
        lambda firsts: _along(firsts, xs),
        xs,
    )
    return list(zip(*columns, strict=True))


def _replicated(
    name: str, arrays: Sequence[np.ndarray], mode: str, by: Differentiate
) -> list[tuple[Any, Any, Any]]:
    repl = helpers.make(len(arrays))

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        r = repl.replica_id
        x = helpers.opaque(arrays[r])
        return by(
            lambda: CASES[name].run(repl, x),
            lambda y: repl.linked(_loss(y, r)),
            lambda d: repl.linked(tf.reduce_sum(_direction(x, r) * d)),
            x,
        )

    columns = helpers.run(mode, repl, lambda: step)
    return list(zip(*columns, strict=True))


def _assert_equal(name: str, num_replicas: int, mode: str, by: Differentiate) -> None:
    arrays = CASES[name].inputs(num_replicas)
    got = _replicated(name, arrays, mode, by)
    want = _reference(name, arrays)
    for r in range(num_replicas):
        for what, one, two in zip(("value", "d", "dd"), got[r], want[r], strict=True):
            np.testing.assert_allclose(
                one, two, rtol=1e-12, atol=1e-12, err_msg=f"{what}, replica {r}"
            )
        if CASES[name].same:
            assert np.asarray(got[r][0]).tobytes() == np.asarray(got[0][0]).tobytes()


COUNTS = [(name, n) for name in DISTINCT for n in (1, 2, 8)]
COUNTS += [(name, 4) for name in CASES if name not in DISTINCT]


@pytest.mark.battery(8)
@pytest.mark.parametrize(("name", "num_replicas"), COUNTS)
def test_equals_plain_by_tape(name: str, num_replicas: int) -> None:
    _assert_equal(name, num_replicas, "eager", _by_tape)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize("name", CASES)
def test_equals_plain_by_tf_gradients(name: str, mode: str) -> None:
    _assert_equal(name, 3, mode, _by_tf_gradients)


@pytest.mark.parametrize("name", ["sum", "broadcast", "gather", "scatter"])
def test_equals_plain_by_tape_in_a_session(name: str) -> None:
    _assert_equal(name, 2, "session", _by_tape)


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", DISTINCT)
def test_equals_numeric_differentiation(name: str) -> None:
    arrays = CASES[name].inputs(3)
    repl = helpers.make(3)

    def losses(*values: Any) -> list[Any]:
        def step() -> tf.Tensor:
            r = repl.replica_id
            return _loss(CASES[name].run(repl, tf.identity(values[r])), r)

        return repl.run(step)

    losses_fn = tf.function(losses)

    def total(values: Sequence[np.ndarray]) -> float:
        return float(sum(losses_fn(*[tf.constant(v) for v in values])))

    step = 1e-6
    _, first, _ = zip(*_replicated(name, arrays, "eager", _by_tape), strict=True)
    for r in range(3):
        if not arrays[r].size:
            continue
        up, down = ([a.copy() for a in arrays] for _ in range(2))
        up[r][0, 1] += step
        down[r][0, 1] -= step
        numeric = (total(up) - total(down)) / (2 * step)
        # Central differences err by step**2, and by rounding / step.
        np.testing.assert_allclose(first[r][0, 1], numeric, rtol=1e-6, atol=1e-7)


@tf.custom_gradient
def _narrowed(y: tf.Tensor) -> Any:
    """Returns y; its gradient arrives in another dtype."""
    return tf.identity(y), lambda d: tf.cast(d, tf.float32)


# Those whose last op is one of TensorFlow's, a division, end in TensorFlow's own error.
_LAST = [name for name in DISTINCT if name not in ("weighted", "map_reduce")]


@pytest.mark.battery(4)
@pytest.mark.parametrize("name", _LAST)
def test_gradients_of_another_dtype_are_taken_in_that_of_the_result(name: str) -> None:
    arrays = CASES[name].inputs(2)
    repl = helpers.make(2)

    def step_fn() -> Any:
        r = repl.replica_id
        x = helpers.opaque(arrays[r])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = repl.linked(_loss(_narrowed(CASES[name].run(repl, x)), r))
        return tape.gradient(loss, x, unconnected_gradients="zero")

    expected = _reference(name, arrays)
    for one, (_, two, _) in zip(repl.run(step_fn), expected, strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
