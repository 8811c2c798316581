# SPDX-License-Identifier: Apache-2.0
"""Changing ops that are built: each private name is called."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from replicator._tf import effects, graphs, ops
from tests._tf import shared


def test_set_input_rewires_a_built_op():
    with tf.Graph().as_default() as graph:
        one, two = tf.constant(1.0), tf.constant(2.0)
        total = tf.add(one, one)
        ops.set_input(total.op, 1, two)
        assert total.op.inputs[1] is two
        assert two.consumers() == [total.op]
        assert shared.evaluate(total, graph) == 3.0


def test_set_input_rewires_in_a_function():
    @tf.function(autograph=False)
    def function(x):
        total = tf.add(x, x)
        ops.set_input(total.op, 1, tf.constant(5.0))
        return total

    assert float(function(tf.constant(1.0))) == 6.0


def test_add_control_inputs_reaches_built_ops():
    order: list[str] = []
    with tf.Graph().as_default() as graph:
        last = tf.py_function(lambda: order.append("last") or 1.0, [], tf.float32)
        first = tf.py_function(lambda: order.append("first") or 1.0, [], tf.float32)
        ops.add_control_inputs(last.op, [])
        assert not last.op.control_inputs
        ops.add_control_inputs(last.op, [first.op])
        assert last.op.control_inputs == [first.op]
        shared.evaluate(last, graph)
    assert order == ["first", "last"]


def test_set_text_attr_changes_a_built_op():
    with tf.Graph().as_default():
        y = tf.raw_ops.StringFormat(inputs=[tf.constant(1)], template="a %s")
        ops.set_text_attr(y.op, "template", "b %s")
        assert y.op.get_attr("template") == b"b %s"
        with tf.compat.v1.Session() as session:
            assert session.run(y) == b"b 1"


def test_empty_constant_frees_what_it_holds_and_keeps_its_shape():
    for value in (np.ones([7, 100]), np.ones([700], np.bool_), np.ones([700], "F")):
        with tf.Graph().as_default():
            constant = tf.constant(value)
            ops.empty_constant(constant.op)
            held = constant.op.get_attr("value")
            assert held.ByteSize() < 50
            assert tf.make_ndarray(held).shape == value.shape


def test_resource_shape_is_what_is_known_of_the_variable():
    with tf.Graph().as_default():
        one = tf.Variable(tf.ones([5, 3]))
        unknown = tf.Variable(tf.ones([5, 3]), shape=[None, 3])
        assert ops.resource_shape(one.handle) == [5, 3]
        assert ops.resource_shape(unknown.handle).as_list() == [None, 3]
        handle = tf.compat.v1.placeholder(tf.resource, [])
        assert ops.resource_shape(handle).rank is None


def test_set_int_attr_changes_a_built_op():
    with tf.Graph().as_default() as graph:
        tf.compat.v1.set_random_seed(None)
        draws = [tf.compat.v1.random_uniform([], seed=s) for s in (7, 8)]
        for name in ("seed", "seed2"):
            ops.set_int_attr(draws[1].op, name, draws[0].op.get_attr(name))
        assert draws[1].op.get_attr("seed2") == draws[0].op.get_attr("seed2")
        with tf.compat.v1.Session(graph=graph) as session:
            one, two = session.run(draws)
    assert one == two


def test_set_ints_attr_keeps_a_list_in_the_node_of_an_op():
    with tf.Graph().as_default() as graph:
        made = tf.constant(1)
        ops.set_ints_attr(made.op, "_numbers", [1, 0, -1])
        assert made.op.get_attr("_numbers") == [1, 0, -1]
        (node,) = graph.as_graph_def().node
        assert list(node.attr["_numbers"].list.i) == [1, 0, -1]


def test_copy_handle_data_tells_a_resource_what_another_knows():
    with tf.Graph().as_default():
        variable = tf.Variable([1.0, 2.0])
        bare = tf.compat.v1.placeholder(tf.resource, [])
        ops.copy_handle_data(variable.handle, bare)
        read = tf.raw_ops.ReadVariableOp(resource=bare, dtype=tf.float32)
        assert read.shape == [2]


def test_read_only_inputs_are_what_tensorflow_takes_them_for():
    def body(x):
        return x + variable

    with tf.Graph().as_default() as graph:
        variable = tf.Variable(1.0)
        tf.while_loop(lambda x: x < 3.0, body, [tf.constant(0.0)])
        loop = [op for op in graph.get_operations() if "While" in op.type][0]
        handle = id(variable.handle)
        assert effects.resources_touched(loop) == ({handle}, set())
        ops.set_read_only_inputs(loop, [])
        assert effects.resources_touched(loop) == (set(), {handle})


def test_move_control_outputs_keeps_what_else_is_waited_for():
    with tf.Graph().as_default():
        old, new, other = tf.no_op("old"), tf.no_op("new"), tf.no_op("other")
        with tf.control_dependencies([old, other]):
            late = tf.no_op("late")
        assert ops.control_outputs(old) == [late]
        ops.move_control_outputs(old, new)
        assert set(late.control_inputs) == {new, other}
        assert ops.control_outputs(old) == []


def test_abandoned_ops_do_not_run():
    calls = []

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()
        start = graphs.operation_count(graph)
        tf.py_function(lambda: calls.append("abandoned"), [], [])
        abandoned = graph.get_operations()[start:]
        ops.abandon(abandoned)
        tf.py_function(lambda: calls.append("kept"), [], [])
        assert [ops.is_abandoned(op) for op in graph.get_operations()[start:]] == [
            op in abandoned for op in graph.get_operations()[start:]
        ]
        return tf.constant(0)

    function()
    assert calls == ["kept"]


def test_replace_rewires_all_consumers():
    with tf.Graph().as_default() as graph:
        one, two = tf.constant(1.0), tf.constant(2.0)
        total = tf.add(one, one) * one
        ops.replace(one, two)
        assert not one.consumers()
        assert shared.evaluate(total, graph) == 8.0


def test_move_to_device_moves_an_op_away_from_those_beside_it():
    with tf.Graph().as_default() as graph:
        with tf.device("CPU:0"):
            one = tf.constant(1.0)
        with graph.colocate_with(one.op):
            two = tf.negative(one)
        assert "_class" in two.op.node_def.attr
        ops.move_to_device(two.op, "/device:CPU:1")
        assert "_class" not in two.op.node_def.attr
        assert two.device == "/device:CPU:1"
        assert shared.evaluate(two, graph) == -1.0
