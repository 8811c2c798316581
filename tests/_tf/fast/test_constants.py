# SPDX-License-Identifier: Apache-2.0
"""Constants are replaced as soon as they are made, wherever that is."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator._tf import choice

pytestmark = pytest.mark.fast


def _full(value: float) -> np.ndarray:
    return np.full([300], value, np.float32)  # smaller ones are captured as constants


def test_replace_new_constant_replaces_what_a_device_function_says():
    outside = tf.constant(_full(5.0))
    values = []

    def replacement(value):
        values.append(value[0])
        return tf.compat.v1.get_default_graph().capture(outside)

    def place(op):
        if op.type == "Const" and op.outputs[0].shape == [300]:
            choice.replace_new_constant(op, replacement)
        return op.device

    @tf.function(autograph=False)
    def function(flag):
        with tf.compat.v1.get_default_graph().device(place):
            one = tf.constant(_full(1.0))
            branch = tf.cond(flag, lambda: _full(3.0) * one, lambda: one)
            turns = tf.while_loop(
                lambda i, _: i < 2, lambda i, x: (i + 1, x + _full(7.0)), (0, one)
            )[1]
            with tf.init_scope():
                eager = tf.constant(_full(1.0)) + 1.0
        after = tf.constant(_full(1.0))
        return one, branch, turns, eager, after

    got = [float(y[0]) for y in function(tf.constant(True))]
    assert got == [5.0, 25.0, 15.0, 2.0, 1.0]
    assert sorted(values) == [1.0, 3.0, 7.0]


def test_what_is_replaced_is_held_no_more():
    outside = tf.constant(np.ones([1000]))

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()

        def place(op):
            choice.replace_new_constant(op, lambda _: graph.capture(outside))
            return op.device

        with graph.device(place):
            return tf.constant(np.zeros([1000]))

    traced = function.get_concrete_function()
    assert traced.graph.as_graph_def().ByteSize() < 1000
    np.testing.assert_array_equal(traced(), outside)


def test_a_constant_that_is_made_in_another_way_stays():
    with tf.Graph().as_default() as graph:
        first = tf.constant([1.0])
        choice.replace_new_constant(first.op, lambda _: tf.constant([2.0]))
        second, third = tf.constant([3.0]), tf.identity(first)
        assert second.op.type == "Const" and third.op.inputs[0] is first
    with tf.compat.v1.Session(graph=graph) as session:
        assert session.run([first, second]) == [1.0, 3.0]
