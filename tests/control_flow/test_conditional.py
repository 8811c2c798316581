# SPDX-License-Identifier: Apache-2.0
"""Communication inside tf.cond, tf.case and tf.switch_case."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests import helpers
from tests.control_flow import worlds
from tests.control_flow.worlds import World


def _one_branch(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        world.total(x) > -100.0, lambda: world.all_reduce(x) * x, lambda: x * 2.0
    )


def _other_branch(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        world.known(False), lambda: x * 2.0, lambda: world.gathered(x * x) * x
    )


def _both_branches(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        world.known(True),
        lambda: world.all_reduce(world.first(x) * x) + x,
        lambda: world.gathered(x),
    )


def _neither_taken(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(world.known(False), lambda: world.all_reduce(x), lambda: x * x)


def _in_the_predicate(world: World, x: tf.Tensor) -> tf.Tensor:
    largest = world.all_reduce(tf.reduce_max(x, -1, keepdims=True) * 0.0 + 1.0, "max")
    pred = tf.reduce_max(largest) > 0.0
    return tf.cond(pred, lambda: world.first(x) * x, lambda: x)


def _case(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.case(
        [
            (world.known(False), lambda: x),
            (world.known(True), lambda: world.all_reduce(tf.sin(x)) * x),
        ],
        default=lambda: world.first(x),
    )


def _switch_case(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.switch_case(
        world.known(1),
        [
            lambda: x,
            lambda: world.all_reduce(tf.sin(x)) * x,
            lambda: world.first(world.gathered(x)),
        ],
    )


PROGRAMS = [
    _one_branch,
    _other_branch,
    _both_branches,
    _neither_taken,
    _in_the_predicate,
    _case,
    _switch_case,
]


@pytest.mark.battery(6)
@pytest.mark.parametrize("way", worlds.WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_equals_plain(program: worlds.Program, way: str) -> None:
    worlds.assert_equal(program, way)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_groups_take_their_own_branches(mode: str) -> None:
    repl = helpers.make(4)
    groups = repl.groups([[0, 1], [2, 3]])

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        x = helpers.opaque(repl.replica_id + 1.0)
        large = repl.all_reduce(x, group=groups) > 4.0
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(
                large,
                lambda: repl.all_reduce(x, group=groups) * x,
                lambda: repl.all_reduce(2.0 * x, group=groups),
            )
        return y, tape.gradient(y, x)

    y, d = helpers.run(mode, repl, lambda: step)
    assert list(y) == [6.0, 6.0, 21.0, 28.0]
    assert list(d) == [4.0, 4.0, 14.0, 14.0]
