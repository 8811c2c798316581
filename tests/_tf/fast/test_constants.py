"""Constants give way to others as soon as they are made, wherever that is."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator import _tf

pytestmark = pytest.mark.fast


def test_replacing_constants_replaces_what_is_meant():
    outside = tf.constant([5.0, 6.0])
    values = []

    def replacement(value):
        values.append(value)
        if value[0] == 9.0:
            return None
        return tf.compat.v1.get_default_graph().capture(outside)

    @tf.function(autograph=False)
    def function(flag):
        with _tf.replacing_constants(lambda t: t.shape == [2], replacement):
            replaced = tf.constant([1.0, 2.0])
            branch = tf.cond(flag, lambda: [3.0, 4.0] * replaced, lambda: replaced)
            turns = tf.while_loop(
                lambda i, _: i < 2, lambda i, x: (i + 1, x + [7.0, 8.0]), (0, replaced)
            )[1]
            kept = tf.constant([9.0, 9.0])
            with tf.init_scope():
                eager = tf.constant([1.0, 1.0]) + 1.0
        after = tf.constant([1.0, 2.0])
        return replaced, branch, turns, kept, eager, after, tf.constant([1.0, 2.0, 3.0])

    got = [list(map(float, y)) for y in function(tf.constant(True))]
    assert got[:3] == [[5.0, 6.0], [25.0, 36.0], [15.0, 18.0]]
    assert got[3:] == [[9.0, 9.0], [2.0, 2.0], [1.0, 2.0], [1.0, 2.0, 3.0]]
    assert sorted(value[0] for value in values) == [1.0, 3.0, 7.0, 9.0]


def test_what_is_replaced_is_held_no_more():
    outside = tf.constant(np.ones([1000]))

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()
        with _tf.replacing_constants(lambda t: True, lambda _: graph.capture(outside)):
            return tf.constant(np.zeros([1000]))

    traced = function.get_concrete_function()
    assert traced.graph.as_graph_def().ByteSize() < 1000
    np.testing.assert_array_equal(traced(), outside)
