# SPDX-License-Identifier: Apache-2.0
"""An identity of a handle is the variable: tests/programs/writes.py uses some.

Here, a step returns one.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator.graph.passes import identities
from tests import helpers


def _read(handle: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)


def test_what_reads_through_identities_waits_for_what_they_wait_for() -> None:
    with tf.Graph().as_default() as graph:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[])
        gates, other = [tf.no_op(), tf.no_op()], handle
        for gate in gates:
            with tf.control_dependencies([gate]):
                other = tf.identity(other)
        read = _read(other).op
        assert identities.seen_through(other) is handle
        identities.see_through(graph.get_operations())
    assert read.inputs[0] is handle
    assert set(read.control_inputs) == set(gates)


@pytest.mark.parametrize("inside_function", [False, True])
@pytest.mark.parametrize("count", [0, 2])
def test_a_step_may_return_one(count: int, inside_function: bool) -> None:
    repl = helpers.make(2)
    variable = tf.Variable([1.0, 1.0])

    def step_fn(handle: tf.Tensor) -> tf.Tensor:
        for _ in range(count):
            handle = tf.identity(handle)
        return handle

    def program() -> list[tf.Tensor]:
        return [_read(each) for each in repl.run(step_fn, args=(variable.handle,))]

    for value in tf.function(program)() if inside_function else program():
        assert value.numpy().tolist() == [1.0, 1.0]
