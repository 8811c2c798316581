# SPDX-License-Identifier: Apache-2.0
"""Communication inside control flow inside control flow."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.control_flow import worlds
from tests.control_flow.worlds import World


def _turn(world: World, n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Takes the two branches alternately."""
    x = tf.cond(
        tf.equal(n % 2, 0),
        lambda: world.all_reduce(x) * 0.3 * x + x,
        lambda: world.first(x) * x,
    )
    return n + 1, x


def _conditional_in_loop(world: World, x: tf.Tensor) -> tf.Tensor:
    start = tf.constant(0)
    return tf.while_loop(
        lambda n, x: n < 3, lambda n, x: _turn(world, n, x), [start, x]
    )[1]


def _loop_in_conditional(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        world.known(True),
        lambda: tf.while_loop(
            lambda n, x: n < 2,
            lambda n, x: (n + 1, world.all_reduce(x) * 0.3 * x + x),
            [tf.constant(0), x],
        )[1],
        lambda: x,
    )


def _loop_in_loop(world: World, x: tf.Tensor) -> tf.Tensor:
    def turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.while_loop(
            lambda m, x: m < n + 1,
            lambda m, x: (m + 1, tf.sin(world.all_reduce(x)) * 0.3 * x + x),
            [tf.constant(0), x],
        )[1]
        return n + 1, x * 1.1

    return tf.while_loop(lambda n, x: n < 2, turn, [tf.constant(0), x])[1]


def _function_in_loop(world: World, x: tf.Tensor) -> tf.Tensor:
    function = tf.function(lambda x: tf.sin(world.all_reduce(x * x)) * x)
    return tf.while_loop(
        lambda n, x: n < 2,
        lambda n, x: (n + 1, function(x) + function(0.5 * x)),
        [tf.constant(0), x],
    )[1]


def _four_deep(world: World, x: tf.Tensor) -> tf.Tensor:
    """A conditional in a loop in a function in a scan."""
    function = tf.function(lambda x: _conditional_in_loop(world, x))
    stacked = tf.stack([x, 2.0 * x])
    return tf.scan(lambda a, x: a * 0.5 + function(x), stacked, initializer=x)[-1]


PROGRAMS = [
    _conditional_in_loop,
    _loop_in_conditional,
    _loop_in_loop,
    _function_in_loop,
]


@pytest.mark.battery(6)
@pytest.mark.parametrize("way", worlds.WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_equals_plain(program: worlds.Program, way: str) -> None:
    worlds.assert_equal(program, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*worlds.WAYS, "three replicas"])
def test_four_deep_equals_plain(way: str) -> None:
    worlds.assert_equal(_four_deep, way)
