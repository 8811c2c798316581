# SPDX-License-Identifier: Apache-2.0
"""Ops added in bulk equal others: each private name is called."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator._tf import choice
from tests import helpers
from tests._tf import shared

pytestmark = pytest.mark.fast


def test_import_nodes_adds_ops_in_order_with_devices_and_inputs():
    with tf.Graph().as_default() as graph:
        with tf.device("CPU:1"):
            x = tf.constant(2.0, name="x")
            tf.multiply(tf.sin(x, name="y"), x, name="z")
        definition = graph.as_graph_def()
        del definition.node[0]
        for node in definition.node:
            node.input[:] = ["given:0" if n == "x" else n for n in node.input]
        source = tf.constant(3.0)
        ops = choice.import_nodes(graph, definition, {"given:0": source}, "again/")
        assert [op.name for op in ops] == ["again/y", "again/z"]
        assert {op.device for op in ops} == {x.op.device}
        assert ops[1].inputs[1] is source
        assert graph.get_operation_by_name("again/z") is ops[1]
        assert shared.evaluate(ops[1].outputs[0], graph) == pytest.approx(0.42336)


def test_nodes_are_added_as_other_ops_are():
    with tf.Graph().as_default() as graph:
        x = tf.constant([[1.0, 2.0]])
        before = tf.no_op()
        nodes = choice.Nodes()
        value = tf.make_tensor_proto(0)
        axis = nodes.add("Const", (), "/CPU:1", dtype=tf.int32, value=value)
        both = nodes.add("ConcatV2", [x, x, axis], N=2, T=x.dtype, Tidx=tf.int32)
        shape = tf.TensorShape([None, 2])
        nodes.add("PlaceholderWithDefault", [both], dtype=x.dtype, shape=shape)
        nodes.add("Placeholder", dtype=x.dtype, shape=tf.TensorShape([]))
        with (
            tf.name_scope("outer"),
            tf.device("CPU:2"),
            tf.control_dependencies([before]),
        ):
            ops = nodes.finish("inner")
        types = ["Const", "ConcatV2", "PlaceholderWithDefault", "Placeholder"]
        assert [op.type for op in ops] == types
        assert [op.name for op in ops] == sorted(op.name for op in ops)
        assert all(op.name.startswith("outer/inner/") for op in ops)
        assert [op.device[-5:] for op in ops] == ["CPU:1"] + ["CPU:2"] * 3
        assert all(op.control_inputs == [before] for op in ops)
        assert ops[1].outputs[0].shape == [2, 2]
        assert ops[2].outputs[0].shape.as_list() == [None, 2]
        assert ops[3].outputs[0].shape == []
        total = tf.reduce_sum(ops[2].outputs[0])
        assert shared.evaluate(total, graph) == 6.0


def test_nodes_stand_in_the_control_flow_around():
    def body(x: tf.Tensor) -> tf.Tensor:
        nodes = choice.Nodes()
        nodes.add("Square", [x], T=x.dtype)
        (op,) = nodes.finish("inside")
        return op.outputs[0]

    with helpers.v1_control_flow(), tf.Graph().as_default() as graph:
        loop = tf.compat.v1.while_loop(lambda x: x < 100.0, body, [tf.constant(2.0)])
        assert shared.evaluate(loop, graph) == 256.0
