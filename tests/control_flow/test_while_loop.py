# SPDX-License-Identifier: Apache-2.0
"""Communication inside the body and the condition of tf.while_loop."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests import helpers
from tests.control_flow import worlds
from tests.control_flow.worlds import World


def _in_the_body(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda n, x: n < 3,
        lambda n, x: (n + 1, tf.sin(world.all_reduce(x)) * x + x),
        [tf.constant(0), x],
    )[1]


def _in_the_condition(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda x: world.total(x * x) < 20.0, lambda x: (1.5 * x * x + x,), [x]
    )[0]


def _in_both(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda x: world.total(x * x) < 20.0,
        lambda x: (1.5 * x + tf.sin(world.first(x)) + world.gathered(x),),
        [x],
    )[0]


def _no_turn(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda n, x: n < 0,
        lambda n, x: (n + 1, world.all_reduce(x)),
        [world.known(0), x * x],
    )[1]


def _at_most(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda n, x: n < 7,
        lambda n, x: [n + 1, tf.sin(world.all_reduce(x, "mean")) * x + x],
        [world.known(0), x],
        maximum_iterations=3,
    )[1]


def _captured(world: World, x: tf.Tensor) -> tf.Tensor:
    total = world.all_reduce(x)
    return tf.while_loop(
        lambda n, y: n < 2,
        lambda n, y: (n + 1, y * total + world.all_reduce(x * y) + world.first(total)),
        [tf.constant(0), x],
    )[1]


PROGRAMS = [_in_the_body, _in_the_condition, _in_both, _no_turn, _at_most, _captured]


@pytest.mark.battery(6)
@pytest.mark.parametrize("way", worlds.WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_equals_plain(program: worlds.Program, way: str) -> None:
    worlds.assert_equal(program, way)


@pytest.mark.battery(6)
@pytest.mark.parametrize("way", worlds.MORE_WAYS)
def test_equals_plain_in_other_ways(way: str) -> None:
    worlds.assert_equal(_captured, way)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_messages_back_and_forth_in_each_turn(mode: str) -> None:
    repl = helpers.make(2)
    spec = tf.TensorSpec([], tf.float32)

    def turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if repl.replica_id == 0:
            repl.send(x, 1)
            return n + 1, repl.recv(spec, 1)
        received = repl.recv(spec, 0)
        repl.send(2.0 * received, 0)
        return n + 1, received + 1.0

    def step() -> tf.Tensor:
        x = helpers.opaque(repl.replica_id + 1.0)
        return tf.while_loop(lambda n, x: n < 3, turn, [tf.constant(0), x])[1]

    # Replica 0 has 1, 2, 4, 8; replica 1 has one more than replica 0 had.
    assert list(helpers.run(mode, repl, lambda: step)) == [8.0, 5.0]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_what_was_broadcast_can_be_reduced_in_a_loop(num_replicas: int) -> None:
    """The sum of one tensor with itself: Grappler's version of it hung in a loop."""
    repl = helpers.make(num_replicas)

    def turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return n + 1, repl.all_reduce(repl.broadcast(x, root=0))

    def step() -> tf.Tensor:
        start = tf.constant(0), tf.constant(1.0 + repl.replica_id)
        return tf.while_loop(lambda n, x: n < 3, turn, start)[1]

    assert [float(x) for x in repl.run(step)] == [num_replicas**3] * num_replicas


@pytest.mark.battery(2)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("place", ["body", "condition", "both"])
@pytest.mark.parametrize("counted", [True, False])
def test_effects_of_the_condition_happen_each_time_on_all_replicas(
    place: str, mode: str, counted: bool
) -> None:
    """Though the merged loop needs one replica's condition, and makes turns at once."""
    repl = helpers.make(2)
    log: list[tuple[int, int]] = []

    def make_step() -> Any:
        total = tf.Variable([0.0, 0.0])

        def step() -> tuple[tf.Tensor, tf.Tensor]:
            r = repl.replica_id
            last = 4 if counted else repl.all_reduce(helpers.opaque(2))

            def condition(n: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
                tf.numpy_function(lambda n: log.append((r, int(n))), [n], [])
                if place != "body":
                    total.assign_add(repl.all_reduce([1.0, float(r)]))
                return n < last

            def body(n: tf.Tensor, x: tf.Tensor) -> Any:
                return n + 1, x if place == "condition" else repl.all_reduce(x)

            x = tf.while_loop(condition, body, [0, helpers.opaque(1.0)])[1]
            return x, total.read_value()

        return step

    x, total = helpers.run(mode, repl, make_step)
    assert sorted(log) == [(r, n) for r in range(2) for n in range(5)]
    assert [float(y) for y in x] == [1.0 if place == "condition" else 16.0] * 2
    for values in total:
        assert values.tolist() == ([0.0, 0.0] if place == "body" else [10.0, 5.0])
