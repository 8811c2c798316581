# SPDX-License-Identifier: Apache-2.0
"""Every primitive works anywhere in the graph as at the top level of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.conformance.battery import CASES, DISTINCT

Loss = Callable[[tf.Tensor], tf.Tensor]


def _twice(loss: Loss, x: tf.Tensor) -> tf.Tensor:
    """The same computation as at all places, at the top level."""
    return loss(x) + loss(2.0 * x)


def _cond(loss: Loss, x: tf.Tensor) -> tf.Tensor:
    yes = helpers.opaque(True)
    return tf.cond(yes, lambda: _twice(loss, x), lambda: tf.constant(0.0, x.dtype))


def _while_loop(loss: Loss, x: tf.Tensor) -> tf.Tensor:
    def turn(k: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return k + 1.0, total + loss(k * x)

    one = tf.constant(1.0, x.dtype)
    return tf.while_loop(lambda k, _: k < 2.5, turn, [one, 0.0 * one])[1]


def _function(loss: Loss, x: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda x: _twice(loss, x))(x)


def _map_fn(loss: Loss, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.map_fn(loss, tf.stack([x, 2.0 * x])))


def _nested(loss: Loss, x: tf.Tensor) -> tf.Tensor:
    """A loop in a conditional in a function."""
    return tf.function(
        lambda x: tf.cond(
            helpers.opaque(True), lambda: _while_loop(loss, x), lambda: tf.reduce_sum(x)
        )
    )(x)


def _run(name: str, place: Callable[..., tf.Tensor], mode: str, count: int) -> Any:
    repl = helpers.make(count)
    arrays = CASES[name].inputs(count)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        r = repl.replica_id
        x = helpers.opaque(arrays[r])

        def loss(x: tf.Tensor) -> tf.Tensor:
            y = CASES[name].run(repl, x)
            return repl.linked((r + 1.0) * tf.reduce_sum(tf.sin(y) * y))

        with tf.GradientTape() as tape:
            tape.watch(x)
            total = place(loss, x)
        return total, tape.gradient(total, x, unconnected_gradients="zero")

    return helpers.run(mode, repl, lambda: step)


def _assert_as_at_the_top(
    name: str, place: Callable[..., tf.Tensor], mode: str, count: int
) -> None:
    got, want = _run(name, place, mode, count), _run(name, _twice, "eager", count)
    for what, ones, others in zip(("loss", "d"), got, want, strict=True):
        for r in range(count):
            np.testing.assert_allclose(
                ones[r], others[r], rtol=1e-12, err_msg=f"{what}, replica {r}"
            )


PLACES = [_cond, _while_loop, _function]
SOME = ["sum", "reduce_sum", "gather", "scatter", "all_to_all_rows", "map_gather"]


@pytest.mark.battery(10)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", DISTINCT)
def test_in_control_flow(name: str, place: Callable[..., tf.Tensor]) -> None:
    _assert_as_at_the_top(name, place, "eager", 2)


@pytest.mark.battery(6)
@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize("name", SOME)
def test_deep_in_control_flow(name: str, mode: str) -> None:
    _assert_as_at_the_top(name, _nested, mode, 3)


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", SOME)
def test_in_map_fn(name: str) -> None:
    _assert_as_at_the_top(name, _map_fn, "eager", 3)


@pytest.mark.parametrize("pfor", [True, False], ids=["vectorized", "in a loop"])
def test_jacobian(pfor: bool) -> None:
    """It differentiates in a loop, once per element."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque([1.0 + repl.replica_id, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x, "prod")
        return tape.jacobian(y, x, experimental_use_pfor=pfor)

    # Both replicas have the same y: its derivative is that of the sum of both.
    first, second = repl.run(step)
    np.testing.assert_array_equal(first, [[4.0, 0.0], [0.0, 4.0]])
    np.testing.assert_array_equal(second, [[2.0, 0.0], [0.0, 4.0]])


def test_vectorized_map() -> None:
    repl = helpers.make(2)
    results = repl.run(
        lambda: tf.vectorized_map(
            repl.all_reduce, helpers.opaque([1.0, 2.0]) + repl.replica_id
        )
    )
    for result in results:
        np.testing.assert_array_equal(result, [3.0, 5.0])


def test_a_gradient_may_be_taken_in_another_place() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(2.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = repl.all_reduce(x) ** 2
        return tf.cond(x > 0, lambda: tape.gradient(y, x), lambda: x)

    assert [float(d) for d in repl.run(step)] == [16.0, 16.0]


def test_control_flow_without_communication_stays_apart() -> None:
    """Its turn counts may differ."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = repl.all_reduce(helpers.opaque(1.0))
        while x < 9.0 + 20.0 * repl.replica_id:
            x = 2.0 * x
        return repl.all_reduce(x)

    # 2, 4, 8, 16 on the one, and 32 on the other.
    assert [float(y) for y in repl.run(step)] == [48.0, 48.0]
