# SPDX-License-Identifier: Apache-2.0
"""Turns are counted only where possible, and each draws numbers of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.graph.lowering import iterations
from tests import helpers


def _loop(build: Callable[[], Any]) -> tf.Operation:
    """Returns the loop that a function builds."""

    @tf.function
    def outer() -> Any:
        return build()

    graph = outer.get_concrete_function().graph
    (loop,) = (op for op in graph.get_operations() if "While" in op.type)
    return loop


def _while(condition: Callable[..., Any], body: Callable[..., Any], *start: Any) -> Any:
    return lambda: tf.while_loop(condition, body, [tf.constant(x) for x in start])


def _for(*span: int) -> Callable[[], Any]:
    def loop() -> Any:
        total = tf.constant(0)
        for n in tf.range(*span):
            total += n
        return total

    return loop


COUNTED = {
    "up": (_while(lambda n: n < 5, lambda n: (n + 1,), 0), 5),
    "down": (_while(lambda n: n >= 0, lambda n: (n - 2,), 6), 4),
    "never": (_while(lambda n: n < 0, lambda n: (n + 1,), 0), 0),
    "powers": (_while(lambda n: n <= 64, lambda n: (n * 2,), 1), 7),
    "two counters": (
        _while(
            lambda n, m: tf.logical_and(n < 100, m > 3),
            lambda n, m: (n + 1, m - n),
            0,
            20,
        ),
        7,
    ),
    "a flag": (
        _while(lambda n, go: go, lambda n, go: (n + 1, tf.not_equal(n, 3)), 0, True),
        4,
    ),
    "64 bits": (_while(lambda n: n < 3, lambda n: (n + 1,), np.int64(0)), 3),
    "overflow": (_while(lambda n: n > 0, lambda n: (n + 1,), np.int8(120)), 8),
    "at most": (
        lambda: tf.while_loop(
            lambda n: n < 9, lambda n: (n + 1,), [tf.constant(0)], maximum_iterations=4
        ),
        4,
    ),
    "for": (_for(7), 7),
    "for, from and by": (_for(2, 11, 3), 3),
}
NOT_COUNTED = {
    "what is computed": _while(lambda x: x < 3.0, lambda x: (x * 1.5,), 1.0),
    "what is fed": lambda: tf.while_loop(
        lambda n: n < helpers.opaque(3), lambda n: (n + 1,), [tf.constant(0)]
    ),
    "too many": _while(lambda n: n < 1_000_000, lambda n: (n + 1,), 0),
    "chance": _while(
        lambda n: n < 3,
        lambda n: (n + tf.random.uniform([], 0, 2, tf.int32),),
        0,
    ),
}


@pytest.mark.parametrize("what", COUNTED)
def test_counted(what: str) -> None:
    build, expected = COUNTED[what]
    assert iterations.count(_loop(build)) == expected


@pytest.mark.parametrize("what", NOT_COUNTED)
def test_not_counted(what: str) -> None:
    assert iterations.count(_loop(NOT_COUNTED[what])) is None


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("nested", [False, True])
def test_every_turn_draws_its_own_random_numbers(nested: bool, mode: str) -> None:
    repl = helpers.make(2)

    def draw() -> tf.Tensor:
        return tf.random.uniform([], seed=3)

    def turn(n: tf.Tensor, drawn: Any) -> tuple[tf.Tensor, Any]:
        x = tf.cond(n >= 0, draw, draw) if nested else draw()
        return n + 1, drawn.write(n, repl.all_reduce(x))

    def step() -> tf.Tensor:
        drawn = tf.TensorArray(tf.float32, 4)
        return tf.while_loop(lambda n, _: n < 4, turn, [tf.constant(0), drawn])[
            1
        ].stack()

    tf.random.set_seed(1)
    for draws in helpers.run(mode, repl, lambda: step):
        assert len(set(np.asarray(draws).tolist())) == 4
