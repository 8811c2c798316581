# SPDX-License-Identifier: Apache-2.0
"""Communication inside nested tf.functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.conformance.battery import CASES
from tests.control_flow import worlds
from tests.control_flow.worlds import World


def _square(world: World) -> Callable[[tf.Tensor], tf.Tensor]:
    return tf.function(lambda x: world.all_reduce(x * x) * x)


def _once(world: World, x: tf.Tensor) -> tf.Tensor:
    return _square(world)(x)


def _twice(world: World, x: tf.Tensor) -> tf.Tensor:
    function = _square(world)
    return function(x) + function(x * 0.5)


def _on_its_own_result(world: World, x: tf.Tensor) -> tf.Tensor:
    function = _square(world)
    return function(function(x))


def _three_deep(world: World, x: tf.Tensor) -> tf.Tensor:
    inner = _square(world)
    middle = tf.function(lambda x: inner(x) + world.first(x))
    outer = tf.function(lambda x: middle(x) * inner(x * 0.1) + world.gathered(x))
    return outer(x) + inner(x)


def _recursive(world: World, x: tf.Tensor) -> tf.Tensor:
    @tf.function
    def function(depth: int, x: tf.Tensor) -> tf.Tensor:
        return x if depth == 0 else world.all_reduce(function(depth - 1, x) * x)

    return function(3, x)


def _with_a_signature(world: World, x: tf.Tensor) -> tf.Tensor:
    spec = [tf.TensorSpec(None, tf.float64)]
    function = tf.function(lambda x: world.first(x * x) * x, input_signature=spec)
    return function(x) + function(2.0 * x)


def _linear(world: World, x: tf.Tensor) -> tf.Tensor:
    """Its gradient needs none of the function's intermediate values."""
    function = tf.function(world.all_reduce)
    return function(x) + function(x * x)


PROGRAMS = [
    _once,
    _twice,
    _on_its_own_result,
    _three_deep,
    _recursive,
    _with_a_signature,
    _linear,
]


@pytest.mark.battery(6)
@pytest.mark.parametrize("way", worlds.WAYS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_equals_plain(program: worlds.Program, way: str) -> None:
    worlds.assert_equal(program, way)


@pytest.mark.battery(5)
@pytest.mark.parametrize("way", worlds.MORE_WAYS)
def test_equals_plain_in_other_ways(way: str) -> None:
    worlds.assert_equal(_twice, way)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_method_with_a_variable(mode: str) -> None:
    repl = helpers.make(2)

    class Layer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(2.0)

        @tf.function
        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            return repl.all_reduce(x * self.weight) * x

    def make_step() -> Callable[[], Any]:
        layer = Layer()

        def step() -> Any:
            x = tf.constant(repl.replica_id + 1.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x) + layer(2.0 * x)
            dx, dw = tape.gradient(y, [x, layer.weight])
            layer.weight.assign_sub(0.1 * repl.all_reduce(dw))
            return y, dx, layer(x)

        return step

    y, dx, after = helpers.run(mode, repl, make_step)
    x = np.array([1.0, 2.0])  # y_r = 5 w x_r sum(x), d y / d w in all: 5 * 9
    np.testing.assert_allclose(y, 5 * 2 * x * 3)
    np.testing.assert_allclose(dx, 5 * 2 * (3 + x.sum()) * np.ones(2))
    np.testing.assert_allclose(after, (2 - 0.1 * 45) * x * 3, rtol=1e-5)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_gradients_of_one_function_called_twice_meet_whatever_their_order(
    mode: str,
) -> None:
    repl = helpers.make(2)
    function = tf.function(repl.all_reduce)

    def step() -> Any:
        xs = [helpers.opaque(1.0), helpers.opaque(10.0)]
        with tf.GradientTape() as tape:
            tape.watch(xs)
            ys = [function(xs[0]), 5.0 * function(xs[1])]
        return tape.gradient(ys[:: 1 if repl.replica_id else -1], xs)

    got = helpers.run(mode, repl, lambda: step)
    assert [list(column) for column in got] == [[2.0, 2.0], [10.0, 10.0]]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_function_may_have_another_number_of_traces_on_each_replica(
    mode: str,
) -> None:
    repl = helpers.make(2)
    function = tf.function(lambda x: repl.all_gather(x, axis=0))

    def step() -> Any:
        one, two = ([2, 3], [2, 2])[repl.replica_id]
        first = function(tf.fill([one], 1.0))
        return first, function(tf.fill([two], 2.0)), repl.all_reduce(tf.constant(1.0))

    first, second, _ = helpers.run(mode, repl, lambda: step)
    for r in range(2):
        assert first[r].tolist() == [1.0] * 4
        assert second[r].tolist() == [2.0] * 5


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_concrete_function_called_twice(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        function = tf.function(lambda x: repl.all_reduce(x) * x)
        concrete = function.get_concrete_function(tf.TensorSpec([], tf.float32))
        x = helpers.opaque(repl.replica_id + 1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = concrete(concrete(x))
        return y, tape.gradient(y, x)

    # y0 = x0 s, y1 = x1 s; z_r = (y0 + y1) y_r = s**3 x_r for s = x0 + x1
    y, d = helpers.run(mode, repl, lambda: step)
    np.testing.assert_allclose(y, [27.0, 54.0])
    np.testing.assert_allclose(d, [4 * 27.0] * 2)  # of sum(z) = s**4


@pytest.mark.parametrize("mode", helpers.MODES)
def test_without_results_it_runs_for_its_effects(mode: str) -> None:
    repl = helpers.make(2)
    log: list[float] = []

    def step() -> tf.Tensor:
        x = helpers.opaque(repl.replica_id + 1.0)

        @tf.function
        def function(x: tf.Tensor) -> None:
            tf.py_function(lambda y: log.append(float(y)), [repl.all_reduce(x)], [])

        function(x)
        return x

    helpers.run(mode, repl, lambda: step)
    assert log == [3.0, 3.0]


def test_an_error_while_tracing_leaves_the_next_build_in_step() -> None:
    """Replica 0 has traced the function by then, and replica 1 has not."""
    repl = helpers.make(2)
    function = tf.function(lambda x: repl.all_reduce(x) * 2.0)
    fail = [True]

    def step() -> tf.Tensor:
        x = repl.all_reduce(tf.constant(1.0))
        if repl.replica_id == 0:
            x = function(x)
        if fail:
            raise ValueError("not yet")
        if repl.replica_id == 1:
            x = function(x)
        return repl.all_reduce(x)

    with pytest.raises(ValueError, match="not yet"):
        repl.run(step)
    fail.clear()
    assert [float(y) for y in repl.run(step)] == [16.0, 16.0]


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", CASES)
def test_of_an_unknown_rank_that_its_caller_knows(name: str) -> None:
    """TensorFlow knows the rank only when the function is called."""
    case = CASES[name]
    repl, arrays = helpers.make(3), case.inputs(3)
    spec = [tf.TensorSpec(None, tf.float64)]
    function = tf.function(lambda x: case.run(repl, x), input_signature=spec)

    got = repl.run(lambda: function(tf.constant(arrays[repl.replica_id])))
    want = case.plain([tf.constant(array) for array in arrays])
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_forward_mode(mode: str) -> None:
    repl = helpers.make(2)
    function = tf.function(lambda x: repl.all_reduce(x * x) * x)

    def step() -> Any:
        x = helpers.opaque(repl.replica_id + 1.0)
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
            y = function(x)
        return y, accumulator.jvp(y)

    # y_r = (x0**2 + x1**2) x_r, along the ones: 5 + 2 (x0 + x1) x_r
    y, d = helpers.run(mode, repl, lambda: step)
    assert list(y) == [5.0, 10.0]
    assert list(d) == [11.0, 17.0]
