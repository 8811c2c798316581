# SPDX-License-Identifier: Apache-2.0
"""A graph is copied except for the ops that use parts, whatever their order."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist.rewriting import Handles, Rewriter, joined
from tests.autodist import parts

v1 = tf.compat.v1


def test_what_is_copied_and_what_uses_parts_use_one_another() -> None:
    def build(w: Any) -> Any:
        first = w + 1.0  # copied, from a read; read again after it
        with tf.control_dependencies([w.assign(first)]):
            second = w.read_value() * first
        with tf.control_dependencies([w.assign_sub(second)]):
            return [tf.identity(w.read_value())]

    graphs = parts.divide(build)
    parts.check(graphs)
    assert "Placeholder" not in [
        op.type
        for op in graphs.divided.program.graph.get_operations()
        if not _tf.is_abandoned(op)
    ]


def test_what_waits_for_a_use_waits_for_all_parts() -> None:
    def build(w: Any) -> Any:
        write = w.assign(tf.zeros([4, 2])).op
        with tf.control_dependencies([write]):
            return [tf.no_op("last"), write]

    graphs = parts.divide(build)
    last, write = (graphs.divided.places[op] for op in graphs.fetches)
    assert list(last.control_inputs) == [write]
    done = [op for op in write.control_inputs if op.type == "AssignVariableOp"]
    assert [op.inputs[0].op.name for op in done] == list(parts.ROWS.names)


def test_ops_keep_their_names_devices_and_what_they_wait_for() -> None:
    def build(w: Any) -> Any:
        with tf.device("/CPU:0"), tf.control_dependencies([tf.no_op("first")]):
            return [tf.raw_ops.ReadVariableOp(resource=w.handle, dtype=tf.float32)]

    graphs = parts.divide(build)
    (old,) = graphs.fetches
    new = graphs.divided.places[old.op]
    assert new.name == old.op.name
    for source in new.inputs[:-1]:
        assert source.op.device == old.op.device
        assert [op.name for op in source.op.control_inputs] == ["first"]


def test_given_tensors_are_in_the_places_of_others() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.constant(2.0)
        double = x * 2
    with tf.Graph().as_default() as target, v1.Session() as session:
        made = Rewriter(graph, target, lambda made, op: None)
        made.give(x, tf.constant(5.0))
        made.add([op for op in graph.get_operations() if op is not x.op])
        assert session.run(made.tensor(double)) == 10
        assert made.handles_of(double.op) is None


def test_an_op_is_known_by_the_first_handle_that_it_is_given() -> None:
    with tf.Graph().as_default() as graph:
        v = v1.get_variable("v", [4, 2], use_resource=True)
        read = tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=tf.float32)
    with tf.Graph().as_default() as target, v1.Session() as session:
        own = tuple(tf.constant(k) for k in range(2))  # any handles will do
        taken: list[tf.Operation] = []

        def divide(made: Rewriter, op: tf.Operation) -> tf.Operation:
            taken.append(op)
            assert made.handles_of(op) is handles
            return joined([tf.ones([1, 2]), tf.zeros([3, 2])], parts.ROWS, op.name).op

        handles = Handles(parts.ROWS, own)
        made = Rewriter(graph, target, divide)
        made.divide(v.handle, handles)
        made.add([read.op])
        assert taken == [read.op] and made.places[read.op].name == read.op.name
        assert session.run(made.tensor(read)).sum() == 2
