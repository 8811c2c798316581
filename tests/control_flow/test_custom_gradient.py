# SPDX-License-Identifier: Apache-2.0
"""Communication inside tf.recompute_grad and tf.custom_gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import strategy
from tests import helpers
from tests.control_flow import worlds
from tests.control_flow.worlds import World


def _custom_gradient(world: World, x: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def function(x: tf.Tensor) -> Any:
        def backward(d: tf.Tensor) -> tf.Tensor:
            return world.all_reduce(d) * tf.cos(x) * 3.0

        return world.all_reduce(tf.sin(x)), backward

    return function(x) * x


def _in_a_function(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda x: _custom_gradient(world, x))(x)


@pytest.mark.battery(5)
@pytest.mark.parametrize("way", worlds.WAYS)
@pytest.mark.parametrize(
    "program", [_custom_gradient, _in_a_function], ids=lambda p: p.__name__
)
def test_equals_plain(program: worlds.Program, way: str) -> None:
    worlds.assert_equal(program, way)


@pytest.mark.battery(5)
@pytest.mark.parametrize("where", ["top level", "conditional", "loop", "function"])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_recompute_grad(mode: str, where: str) -> None:
    """TensorFlow has no second derivative of it."""

    def program(world: World, x: tf.Tensor) -> tf.Tensor:
        call = tf.recompute_grad(lambda x: world.all_reduce(tf.sin(x)) * x)
        if where == "conditional":
            return tf.cond(world.known(True), lambda: call(x), lambda: x)
        if where == "loop":
            return tf.while_loop(
                lambda n, x: n < 2, lambda n, x: (n + 1, call(x)), [tf.constant(0), x]
            )[1]
        return tf.function(call)(x) if where == "function" else call(x)

    def differentiate(world: World, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = program(world, x)
        return y, tape.gradient(y, x)

    repl, arrays = helpers.make(2), worlds.inputs(2)
    world = worlds.Replicas(repl)

    def step() -> Any:
        return differentiate(world, helpers.opaque(arrays[repl.replica_id]))

    got = helpers.run(mode, repl, lambda: step)
    want = differentiate(worlds.Plain(), tf.constant(arrays))
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(np.stack(list(one)), two, rtol=1e-9, atol=1e-9)


def _with_given_gradients(function: Any) -> Any:
    @tf.custom_gradient
    def given(x: tf.Tensor) -> Any:
        def backward(d: tf.Tensor, variables: Any) -> Any:
            assert len(variables) == 1
            return d * tf.convert_to_tensor(variables[0]), [d * x]

        return function(x), backward

    return given


@pytest.mark.parametrize(
    "options",
    [{"variables": "mirrored"}, {"strategy": strategy.PartitionedPS()}],
    ids=["mirrored", "in parts"],
)
@pytest.mark.parametrize("wrap", [tf.recompute_grad, _with_given_gradients])
def test_variables_are_found_in_a_session(wrap: Any, options: Any) -> None:
    """TensorFlow looks for them by the names of the ops that make their handles."""
    with tf.Graph().as_default():
        repl = helpers.make(2, **options)
        with repl.context():
            variable = tf.Variable([1.0, 2.0])

        def step() -> Any:
            x = tf.constant([3.0, 4.0]) * (repl.replica_id + 1.0)
            with tf.GradientTape() as tape:
                y = wrap(lambda x: x * variable)(x)
            return tape.gradient(y, variable)

        got = repl.run(step)
        with helpers.session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            np.testing.assert_array_equal(session.run(list(got)), [[3, 4], [6, 8]])
