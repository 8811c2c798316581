# SPDX-License-Identifier: Apache-2.0
"""Steps are traced with only what they need: each private name is called."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator._tf import choice, ops
from replicator.graph.order import ordering
from tests._tf import shared

pytestmark = pytest.mark.fast


def test_trace_orders_and_runs_effects_for_which_no_result_waits():
    variable = tf.Variable(0.0)
    seen: list[int] = []

    def build():
        variable.assign_add(2.0)
        tf.py_function(lambda: seen.append(1), [], [])
        variable.assign(variable * 3.0)
        return [tf.constant(5.0), variable.read_value(), None]

    function = choice.trace(build, ordering.order_as_created)
    assert not any(tensor.op.control_inputs for tensor in function.graph.outputs[:1])
    five, value, nothing = function()
    assert (float(five), float(value), nothing) == (5.0, 6.0, None)
    assert (float(variable), seen) == (6.0, [1])


@pytest.mark.parametrize("abandoned", [True, False])
def test_trace_leaves_out_what_nothing_needs_where_ops_are_abandoned(abandoned):
    variable = tf.Variable(1.0)

    def build():
        used = tf.sin(variable)
        unused = tf.cos(used)
        tf.print(tf.exp(used), output_stream="file:///dev/null")
        variable.assign(tf.tan(used))
        if abandoned:
            ops.abandon([variable.assign(unused, read_value=False)])
        with tf.control_dependencies([tf.abs(used)]):
            return tf.square(used)

    function = shared.traced(build)
    op_types = [node.op for node in function.function_def.node_def]
    assert {"Sin", "Exp", "PrintV2", "Tan", "AssignVariableOp", "Square"} <= set(
        op_types
    )
    assert op_types.count("AssignVariableOp") == 1
    assert "Abs" in op_types and ("Cos" in op_types) != abandoned
    assert float(function()) == pytest.approx(0.7080734)
    assert choice.is_step(function.graph) and not choice.is_step(tf.Graph())


def test_trace_says_whether_there_is_more_than_a_step():
    more = choice.trace(
        lambda: tf.constant(1.0), ordering.order_as_created, only_step=False
    )
    assert not choice.is_step(more.graph)
