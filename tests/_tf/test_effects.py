# SPDX-License-Identifier: Apache-2.0
"""Effects as TensorFlow sees them: each private name is called."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import tensorflow as tf

from replicator._tf import effects
from tests import helpers


def test_which_ops_have_an_effect():
    with tf.Graph().as_default():
        variable = tf.Variable(1.0)
        ops = {
            "add": (tf.constant(1.0) + 1.0).op,
            "read": variable.read_value().op.inputs[0].op,
            "write": variable.assign_add(1.0).op,
            "print": tf.print("hello"),
            "random": tf.random.uniform([]).op.inputs[0].op,
        }
        while ops["write"].type == "Identity":
            ops["write"] = ops["write"].inputs[0].op
        ops["write"] = variable.assign_add(1.0, read_value=False)
    stateful = {name for name, op in ops.items() if effects.is_stateful(op)}
    assert [name for name, op in ops.items() if effects.only_reads(op)] == ["read"]
    assert "add" not in stateful
    assert {"write", "print"} <= stateful


def test_resources_touched_tells_reads_from_writes():
    with tf.Graph().as_default():
        variable = tf.Variable(1.0)
        handle = id(variable.handle)
        read = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32).op
        write = variable.assign_add(1.0, read_value=False)
        assert effects.resources_touched(read) == ({handle}, set())
        assert effects.resources_touched(write) == (set(), {handle})


def test_importing_the_library_changes_nothing_in_tensorflow():
    program = (
        "from tensorflow.python.framework import auto_control_deps as acd, ops\n"
        "import tensorflow as tf\n"
        "resolvers = acd._acd_resource_resolvers_registry\n"
        "states = lambda: (resolvers.list(), dict(vars(ops.Graph)),"
        " dict(vars(tf.Variable)), dict(vars(tf.Operation)))\n"
        "before = states()\n"
        "import replicator\n"
        "assert [*replicator.__all__] and replicator.Replicator\n"
        "assert states() == before, states()[0]\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("depth", [1, 2])
def test_a_function_orders_all_uses_of_what_it_captured_twice(depth):
    """Once as a handle, and once as an identity of it that was made outside."""
    effects.order_captured_twice()
    variable, bodies = tf.Variable(1.0), []

    def use(handle, other):
        bodies.append(tf.compat.v1.get_default_graph())
        one = tf.raw_ops.ReadVariableOp(resource=other, dtype=tf.float32)
        tf.raw_ops.AssignVariableOp(resource=handle, value=2.0)
        two = tf.raw_ops.ReadVariableOp(resource=other, dtype=tf.float32)
        return one, two

    @tf.function(autograph=False)
    def outermost():
        other = tf.identity(variable.handle)
        inner = tf.function(lambda: use(variable.handle, other), autograph=False)
        return inner() if depth == 1 else tf.function(inner, autograph=False)()

    assert [float(value) for value in outermost()] == [1.0, 2.0]
    kinds = "ReadVariableOp", "AssignVariableOp"
    read, write, again = (op for op in bodies[0].get_operations() if op.type in kinds)
    assert read in write.control_inputs
    assert write in again.control_inputs


def test_run_independently_takes_an_op_out_of_the_order():
    @tf.function(autograph=False)
    def function():
        one = tf.print("", end="", output_stream="file:///dev/null")
        two = tf.print("", end="", output_stream="file:///dev/null")
        three = tf.print("", end="", output_stream="file:///dev/null")
        effects.run_independently(two.graph, two)
        return one.name, two.name, three.name

    graph = function.get_concrete_function().graph
    one, two, three = (op for op in graph.get_operations() if op.type == "PrintV2")
    assert not two.control_inputs
    assert one in three.control_inputs
    assert two in graph.control_outputs  # it runs all the same
    with tf.Graph().as_default() as plain:  # nothing is ordered there
        effects.run_independently(plain, tf.no_op())


@pytest.mark.parametrize("ordered", [True, False])
def test_ordered_branches_keeps_what_nothing_fetches(ordered):
    with tf.Graph().as_default() as graph:
        variable = tf.Variable(1.0)

        def branch() -> tf.Tensor:
            variable.assign_add(1.0)
            return tf.constant(0.0)

        block = effects.ordered_branches(graph) if ordered else contextlib.nullcontext()
        with block:
            taken = tf.cond(helpers.opaque(True), branch, lambda: tf.constant(1.0))
        with tf.compat.v1.Session() as session:
            session.run(variable.initializer)
            session.run(taken)
            assert session.run(variable) == (2.0 if ordered else 1.0)
