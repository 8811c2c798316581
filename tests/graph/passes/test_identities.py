# SPDX-License-Identifier: Apache-2.0
"""A variable used through identities of its handle is the same variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers, sampling

ONES = [1.0, 1.0]


def _read(handle: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)


def _written_by_itself(variable: Any) -> Any:
    handle = tf.identity(variable.handle)
    before = _read(handle)
    variable.assign_add(ONES)
    return before, _read(handle), _read(tf.identity(handle))


def _written_through_an_identity(variable: Any) -> Any:
    before = variable.read_value()
    handle = tf.identity(tf.identity(variable.handle))
    tf.raw_ops.AssignAddVariableOp(resource=handle, value=ONES)
    return before, variable.read_value(), _read(handle)


def _once_the_write_is_done(variable: Any) -> Any:
    before = variable.read_value()
    with tf.control_dependencies([variable.assign_add(ONES)]):
        handle = tf.identity(variable.handle)
    return before, _read(handle), variable.read_value()


@pytest.mark.parametrize(
    ("program", "variables", "mode"),
    sampling.in_turn(
        [_written_by_itself, _written_through_an_identity, _once_the_write_is_done],
        ["mirrored", "sharded"],
        helpers.MODES,
    ),
)
def test_reads_and_writes_keep_their_order(
    program: Callable[[Any], Any], variables: str, mode: str
) -> None:
    repl = helpers.make(2, variables=variables)

    def make() -> Any:
        with repl.context():
            variable = tf.Variable([1.0, 2.0])
        return lambda: program(variable)

    for value, want in zip(helpers.run(mode, repl, make), (1, 2, 2), strict=True):
        np.testing.assert_array_equal(np.stack(list(value)), [[want, want + 1]] * 2)


@pytest.mark.parametrize("inside_function", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_step_may_return_one(count: int, inside_function: bool) -> None:
    repl = helpers.make(2)
    given = tf.Variable(ONES)

    def step_fn(handle: tf.Tensor) -> tf.Tensor:
        for _ in range(count):
            handle = tf.identity(handle)
        return handle

    def program() -> list[tf.Tensor]:
        return [_read(each) for each in repl.run(step_fn, args=(given.handle,))]

    for value in tf.function(program)() if inside_function else program():
        np.testing.assert_array_equal(value, ONES)


def _rows(variable: Any) -> tf.Tensor:
    return tf.while_loop(
        lambda t, total: t < 2,
        lambda t, total: (t + 1, total + variable[t] ** 2),
        [0, tf.constant(0.0)],
    )[1]


def _whole(variable: Any) -> tf.Tensor:
    return tf.while_loop(
        lambda t, total: t < 2,
        lambda t, total: (t + 1, total + tf.reduce_sum(variable**2)),
        [0, tf.constant(0.0)],
    )[1]


def _mapped(variable: Any) -> tf.Tensor:
    return tf.map_fn(
        lambda t: tf.gather(variable, t) ** 3,
        tf.constant([0, 1]),
        fn_output_signature=tf.float32,
    )


@pytest.mark.parametrize(
    ("loss", "variables"),
    sampling.in_turn([_rows, _whole, _mapped], ["mirrored", "sharded"]),
)
def test_gradients_of_loops_that_use_a_variable(
    loss: Callable[[Any], Any], variables: str
) -> None:
    # tf.gradients asks for the variable's shape at the output of the loop.
    repl = helpers.make(2, variables=variables)

    def make() -> Any:
        with repl.context():
            variable = tf.Variable([1.0, 2.0])

        def step_fn() -> Any:
            first = tf.convert_to_tensor(tf.gradients(loss(variable), [variable])[0])
            second = tf.gradients(tf.reduce_sum(first**2), [variable])[0]
            return first, tf.convert_to_tensor(second)

        return step_fn

    def alone() -> Any:
        variable = tf.Variable([1.0, 2.0])
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                value = loss(variable)
            first = tf.convert_to_tensor(tape.gradient(value, variable))
            squares = tf.reduce_sum(first**2)
        return first, tf.convert_to_tensor(outer.gradient(squares, variable))

    for got, want in zip(helpers.run("session", repl, make), alone(), strict=True):
        np.testing.assert_allclose(np.stack(list(got)), [want, want], rtol=1e-6)
