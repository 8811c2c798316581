# SPDX-License-Identifier: Apache-2.0
"""Fast reads and writes equal plain ones: each private name is called."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator._tf import choice

pytestmark = pytest.mark.fast


def _same_op(one, two):
    nodes = [op.node_def for op in (one, two)]
    for node in nodes:
        node.name = ""
    return nodes[0] == nodes[1]


def test_place_of_reads_is_nowhere_where_a_read_is_recorded_or_waits():
    @tf.function
    def build():
        graph = tf.compat.v1.get_default_graph()
        place = choice.place_of_reads()
        assert place is not None and place == choice.place_of_reads()
        with tf.control_dependencies([tf.no_op()]):
            assert choice.place_of_reads() is None
            with tf.control_dependencies(None):
                assert choice.place_of_reads() == place
        with tf.GradientTape():
            assert choice.place_of_reads() is None
        inside = tf.function(lambda: inner.append(choice.place_of_reads()))
        inner: list[Any] = []
        inside()
        assert inner[0] is not None and inner[0] != place
        assert place[0] is graph

    build()


@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("shape", [[2], [None]])
def test_write_quickly_adds_what_the_method_adds(method, shape):
    variable = tf.Variable([1.0, 2.0], shape=tf.TensorShape(shape))

    @tf.function(autograph=False)
    def function():
        like = getattr(variable, method)([0.0, 0.0], read_value=False)
        written = choice.write_quickly(variable, method, like.inputs[1], "named")
        assert written.name == "named"
        assert _same_op(written, like)

    function.get_concrete_function()


def test_write_quickly_leaves_what_does_not_fit():
    variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def function():
        assert choice.write_quickly(variable, "assign", [1.0, 2.0, 3.0], None) is None
        for method in ("assign", "assign_add"):
            with pytest.raises(ValueError, match="int64"):
                choice.write_quickly(
                    variable, method, tf.constant([1, 2], tf.int64), None
                )
        with pytest.raises(ValueError, match="[Ss]hape"):
            choice.write_quickly(variable, "assign_add", [1.0, 2.0, 3.0], None)

    function.get_concrete_function()


def test_read_quickly_adds_what_a_read_adds():
    variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def function():
        value = choice.read_quickly(variable)
        assert _same_op(value.op, variable.read_value().op.inputs[0].op)
        assert value.shape == [2]
        return value

    concrete = function.get_concrete_function()
    assert concrete.graph.variables == (variable,)
    assert list(concrete()) == [1.0, 2.0]


def test_read_quickly_is_differentiated():
    variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def backward():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(choice.read_quickly(variable) ** 3)
            gradient = tape.gradient(loss, variable)
        return gradient, outer.gradient(gradient, variable)

    @tf.function(autograph=False)
    def forward():
        with tf.autodiff.ForwardAccumulator(variable, tf.constant([1.0, 10.0])) as acc:
            return acc.jvp(choice.read_quickly(variable) ** 2)

    first, second = backward()
    assert list(first) == [3.0, 12.0]
    assert list(second) == [6.0, 12.0]
    assert list(forward()) == [2.0, 40.0]


def test_ops_are_added_where_a_function_is_traced_and_nobody_looks():
    variable = tf.Variable(1.0)
    results = []

    def add():
        read = choice.read_quickly(variable)
        written = choice.write_quickly(variable, "assign", 2.0, None)
        assert (read is None) == (written is None)
        results.append(read is not None)

    add()
    tf.function(add)()
    with tf.Graph().as_default():
        add()
    tf.debugging.enable_check_numerics()
    try:
        tf.function(lambda: add())()
    finally:
        tf.debugging.disable_check_numerics()
    assert results == [False, True, False, False]
