# SPDX-License-Identifier: Apache-2.0
"""Communication inside Python's own control flow over tensors."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests import helpers
from tests.control_flow import worlds
from tests.control_flow.worlds import World


def _if(world: World, x: tf.Tensor) -> tf.Tensor:
    if world.known(True):
        x = world.all_reduce(x) * x
    else:
        x = world.first(x)
    return x


def _if_with_return(world: World, x: tf.Tensor) -> tf.Tensor:
    if world.total(x * x) > 1000.0:
        return world.gathered(x)
    y = world.first(x)
    return y * x


def _for_range(world: World, x: tf.Tensor) -> tf.Tensor:
    for k in tf.range(3):
        x = x + tf.sin(world.all_reduce(x)) * tf.cast(k, x.dtype)
    return x


def _for_with_break_and_continue(world: World, x: tf.Tensor) -> tf.Tensor:
    for k in tf.range(4):
        if k == 1:
            continue
        if k == 3:
            break
        x = x + tf.sin(world.all_reduce(x))
    return x


def _for_over_a_tensor(world: World, x: tf.Tensor) -> tf.Tensor:
    y = x
    for factor in tf.stack([world.total(x), 2.0 * world.total(x)]):
        y = y + tf.sin(world.all_reduce(x * factor))
    return y


def _while(world: World, x: tf.Tensor) -> tf.Tensor:
    n = world.known(0)
    while world.total(x * x) < 20.0 and n < 3:
        x = x * 1.5 + tf.sin(world.all_reduce(x))
        n += 1
    return x


PROGRAMS = [
    _if,
    _if_with_return,
    _for_range,
    _for_with_break_and_continue,
    _for_over_a_tensor,
    _while,
]


@pytest.mark.battery(6)
@pytest.mark.parametrize("way", ["eager", "function"])  # sessions have no AutoGraph
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_equals_plain(program: worlds.Program, way: str) -> None:
    worlds.assert_equal(program, way)


def test_in_a_session_inside_a_tf_function() -> None:
    def program(world: World, x: tf.Tensor) -> tf.Tensor:
        return tf.function(lambda x: _for_range(world, x))(x)

    worlds.assert_equal(program, "session")


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_for_over_an_iterator(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        total = tf.constant(0, tf.int64)
        for n in iter(tf.data.Dataset.range(3)):
            total = repl.all_reduce(total + n * (repl.replica_id + 1))
        return total

    # ((0 * 2 + 1 + 2) * 2 + 2 + 4)
    assert [int(x) for x in helpers.run(mode, repl, lambda: step)] == [12, 12]


def test_for_over_iterators_of_other_lengths_is_an_error_that_says_who_went_on() -> (
    None
):
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        total = tf.constant(0, tf.int64)
        for n in iter(tf.data.Dataset.range(3 + repl.replica_id)):
            total = repl.all_reduce(total + n)
        return total

    with pytest.raises(tf.errors.InvalidArgumentError, match="replica"):
        repl.run(step)
