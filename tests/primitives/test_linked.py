# SPDX-License-Identifier: Apache-2.0
"""linked: a loss that depends on sent messages, so that their gradients come back.

test_gradients.py has the gradients of all that is linked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers

X = [2.0, 5.0]  # the operands of replicas 0 and 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_it_is_the_same_value(mode: str, dtype: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = tf.cast(helpers.opaque(X), dtype)
        if repl.replica_id == 0:
            repl.send(x, 1)
        else:
            repl.recv(x, 0)
        y = repl.linked(x)
        assert y.dtype == x.dtype
        assert y.shape == x.shape
        return tf.cast(tf.math.real(y), tf.float32)

    for y in helpers.run(mode, repl, lambda: step):
        np.testing.assert_array_equal(y, X)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_variables_are_trained_through_it(mode: str) -> None:
    """A variable on replica 0 alone moves down the gradient of replica 1's loss."""
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        weight = tf.Variable(2.0)

        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                if repl.replica_id == 0:
                    repl.send(weight * 1.0, 1)
                    loss = repl.linked(0.0)
                else:
                    loss = repl.recv(weight, 0) ** 3 * weight
            d = repl.all_reduce(tape.gradient(loss, weight))
            weight.assign_sub(0.01 * d)
            return weight.read_value()

        return step

    weight = 2.0
    for _ in range(2):
        weight -= 0.01 * 4.0 * weight**3
    got = helpers.run(mode, repl, make_step, steps=2)
    np.testing.assert_allclose(got, [weight] * 2, rtol=1e-6)


def _in_cond(f: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.cond(helpers.opaque(True), f, lambda: tf.constant(0.0))


def _in_loop(f: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.while_loop(lambda k, _: k < 1, lambda k, _: (k + 1, f()), (0, 0.0))[1]


def _in_map_fn(f: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.reduce_sum(tf.map_fn(lambda _: f(), tf.zeros([1])))


def _in_function(f: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.function(f)()


def _in_cond_in_function(f: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.function(lambda: _in_cond(f))()


INSIDE = {
    "conditional": _in_cond,
    "loop": _in_loop,
    "loop in map_fn": _in_map_fn,
    "function": _in_function,
    "function and conditional": _in_cond_in_function,
}


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("place", "primitive"),
    [
        *((place, "send") for place in INSIDE),
        ("loop", "reduce"),
        ("function", "gather"),
    ],
)
def test_what_was_sent_inside_is_linked_there_or_refused(
    place: str, primitive: str
) -> None:
    """Outside, its receipt is out of reach; the error names alternatives."""
    repl = helpers.make(2)

    def sent(x: tf.Tensor) -> tf.Tensor | None:
        """Returns replica 0's message on replica 1."""
        if primitive == "reduce":
            return repl.reduce(x if repl.replica_id == 0 else 0.0 * x, 1)
        if primitive == "gather":
            gathered = repl.gather(x, 1)
            return None if gathered is None else gathered[0]
        if repl.replica_id == 0:
            repl.send(x, 1)
            return None
        return repl.recv(x, 0)

    def step(within: bool) -> tf.Tensor:
        x = helpers.opaque(X[repl.replica_id])

        def part() -> tf.Tensor:
            y = sent(x)
            y = 7.0 * x if y is None else y**3
            return repl.linked(y) if within else y

        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = repl.linked(INSIDE[place](part))
        return tape.gradient(loss, x)

    kind = place.partition(" ")[0]
    with pytest.raises(
        errors.MismatchError,
        match=rf"(?s)A gradient of .* of replica 1 has no partner.*inside a {kind}, "
        rf"replica 0 .*: {primitive} .*Fix: .*send[s]? return repl\.linked\(y\)",
    ):
        repl.run(lambda: step(False))
    got = [float(d) for d in repl.run(lambda: step(True))]
    assert got == [7.0 + 3 * X[0] ** 2, 0.0]
