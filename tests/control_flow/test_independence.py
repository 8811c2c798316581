# SPDX-License-Identifier: Apache-2.0
"""Control flow without communication is left exactly as the user built it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tensorflow as tf

from tests import helpers

PATIENCE = 60.0  # seconds, which only a failing test waits


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_slow_loop_does_not_hold_up_the_other_replicas_loop(
    mode: str, slow: int
) -> None:
    """The slow one waits in its first turn for the other's last."""
    repl = helpers.make(2)
    ended, waited = threading.Event(), []

    def wait(n: tf.Tensor) -> None:
        if int(n) == 0:
            waited.append(ended.wait(PATIENCE))

    def end(n: tf.Tensor) -> None:
        if int(n) == 2:
            ended.set()

    def step() -> tf.Tensor:
        def turn(n: tf.Tensor) -> tuple[tf.Tensor]:
            tf.py_function(wait if repl.replica_id == slow else end, [n], [])
            return (n + 1,)

        n = tf.while_loop(lambda n: n < 3, turn, [helpers.opaque(0)])[0]
        return repl.all_reduce(n)

    assert list(helpers.run(mode, repl, lambda: step)) == [6, 6]
    assert waited == [True]


def test_replicas_may_choose_otherwise() -> None:
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        r = helpers.opaque(repl.replica_id)
        x = tf.while_loop(lambda n, x: n < r, lambda n, x: (n + 1, 2 * x), [0, 1])[1]
        x = tf.cond(r > 1, lambda: x * 10, lambda: x)
        return repl.all_reduce(tf.function(lambda x: x + 1)(x))

    assert [int(y) for y in repl.run(step)] == [2 + 3 + 41] * 3


@pytest.mark.parametrize("mode", ["function", "session"])
def test_the_ops_are_those_that_the_user_built(mode: str) -> None:
    repl = helpers.make(2)
    built: list[tuple[tf.Operation, str, list[Any]]] = []

    def step() -> tf.Tensor:
        x = helpers.opaque(1.0)
        start = len(tf.compat.v1.get_default_graph().get_operations())
        y = tf.while_loop(lambda y: y < 9.0, lambda y: (2.0 * y,), [x])[0]
        y = tf.cond(y > 0.0, lambda: y, lambda: -y)
        y = tf.function(lambda y: y + 1.0)(y)
        y = tf.switch_case(tf.cast(x, tf.int32), [lambda: y, lambda: 2.0 * y])
        for op in tf.compat.v1.get_default_graph().get_operations()[start:]:
            consumers = [c for t in op.outputs for c in t.consumers()]
            built.append((op, str(op.node_def), consumers))
        return tf.cond(x > 0.0, lambda: repl.all_reduce(y), lambda: y)

    helpers.run(mode, repl, lambda: step)
    types = {op.type for op, _, _ in built}
    assert types >= {"StatelessWhile", "StatelessIf", "StatelessCase"}
    for op, definition, consumers in built[:-1]:  # the last one's are merged
        assert str(op.node_def) == definition
        assert (
            consumers
            == [c for t in op.outputs for c in t.consumers()][: len(consumers)]
        )
