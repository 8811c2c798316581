# SPDX-License-Identifier: Apache-2.0
"""Communication inside tf.map_fn, tf.scan, tf.foldl and tf.foldr."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.control_flow import worlds
from tests.control_flow.worlds import World


def _stack(x: tf.Tensor) -> tf.Tensor:
    return tf.stack([x, 2.0 * x, 3.0 * x])


def _map_fn(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.map_fn(lambda x: world.all_reduce(x * x) * x, _stack(x)), 0)


def _scan(world: World, x: tf.Tensor) -> tf.Tensor:
    def turn(a: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        return 0.5 * a + world.gathered(x * x) * x

    return tf.reduce_sum(tf.scan(turn, _stack(x), initializer=x), 0)


def _foldl(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.foldl(lambda a, x: 0.5 * a + world.all_reduce(x * a) * x, _stack(x))


def _foldr(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.foldr(lambda a, x: 0.5 * a + world.first(x * x) * a, _stack(x))


@pytest.mark.battery(6)
@pytest.mark.parametrize("way", worlds.WAYS)
@pytest.mark.parametrize(
    "program", [_map_fn, _scan, _foldl, _foldr], ids=lambda p: p.__name__
)
def test_equals_plain(program: worlds.Program, way: str) -> None:
    worlds.assert_equal(program, way)
