# SPDX-License-Identifier: Apache-2.0
"""Single ops are copied into other graphs, with what they call."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from replicator._tf import copying, frames


def _graph_of(function, *specs):
    return tf.function(function).get_concrete_function(*specs).graph


def test_a_copy_has_other_inputs_and_attributes_and_the_line_of_the_original():
    with tf.Graph().as_default():
        original = tf.cast(tf.constant([1.5]), tf.int32).op  # the original
        line = frames.user_frames(original)
        before = copying.attributes_of(original)
    with tf.Graph().as_default() as graph:
        first = tf.constant([2.5, 3.5])
        other = tf.constant(1).op
        new = copying.add_copy(original, [first], before, {"Truncate": True}, [other])
        assert new.graph is graph
        assert list(new.control_inputs) == [other]
        assert new.get_attr("Truncate")
        assert frames.user_frames(new) == line
        with tf.compat.v1.Session() as session:
            np.testing.assert_array_equal(session.run(new.outputs[0]), [2, 3])


def test_attributes_are_changed_to_python_values_of_all_kinds():
    changes = {"shape_type": tf.int64, "element_dtype": tf.float64}
    with tf.Graph().as_default():
        op = tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=2, element_dtype=tf.float32
        ).op
        attributes = copying.attributes_of(op)
        shape, count = tf.constant(-1, tf.int64), tf.constant(2)
        new = copying.add_copy(op, [shape, count], attributes, changes)
        assert new.get_attr("element_dtype") == tf.float64
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2]).op
        attributes = copying.attributes_of(handle)
        named = {"shared_name": "other", "shape": [3]}
        new = copying.add_copy(handle, [], attributes, named)
        assert new.get_attr("shared_name") == b"other"
        assert new.get_attr("shape").dim[0].size == 3


def test_a_copy_brings_the_functions_that_it_calls():
    @tf.function
    def called(x):
        return tf.cond(x > 0, lambda: 2 * x, lambda: -x)

    spec = tf.TensorSpec([])
    graph = _graph_of(lambda x: called(x), spec)
    op = next(op for op in graph.get_operations() if "Call" in op.type)
    body, outputs = copying.function_graph(op, "f")
    assert len(outputs) == len(op.outputs)
    assert all(out.graph is body for out in outputs)
    with tf.Graph().as_default():
        new = copying.add_copy(op, [tf.constant(3.0)], copying.attributes_of(op), {})
        with tf.compat.v1.Session() as session:
            assert session.run(new.outputs[0]) == 6


def test_a_function_that_is_known_to_the_runtime_only_is_imported():
    def loss(x):
        n = tf.shape(x)[0]
        sizes = tf.fill([n], 2)
        labels = tf.ones([n, 2], tf.int32)
        return tf.nn.ctc_loss(
            labels, tf.stack([x] * 4), sizes, 2 * sizes, blank_index=0
        )

    graph = _graph_of(loss, tf.TensorSpec([None, 3]))
    op = next(op for op in graph.get_operations() if op.type.endswith("While"))
    body, outputs = copying.function_graph(op, "body")
    assert [t.dtype for t in body.inputs] == [t.dtype for t in op.inputs]
    assert [t.dtype for t in outputs] == [t.dtype for t in op.outputs]
    (call,) = (inner for inner in body.get_operations() if copying.is_function(inner))
    inner, results = copying.function_graph(call, "f")
    assert inner is not body
    assert [t.dtype for t in results] == [t.dtype for t in call.outputs]


def test_ops_have_state_if_they_are_registered_so():
    with tf.Graph().as_default():
        drawn = tf.raw_ops.RandomStandardNormal(shape=[2], dtype=tf.float32)
        assert copying.has_state(drawn.op)
        assert not copying.has_state(tf.constant(2).op)
        assert not copying.is_function(tf.constant(2).op)


def test_attributes_as_text_are_equal_for_equal_attributes():
    with tf.Graph().as_default():
        x = tf.constant([1.0, 2.0], name="x")
        twins = [tf.reduce_sum(x, 0).op, tf.reduce_sum(x, 0, name="other").op]
        kept = tf.reduce_sum(x, 0, keepdims=True).op
        with tf.device("CPU:0"):
            constants = [tf.constant(2).op, tf.constant(2).op, tf.constant(3).op]
    texts = [copying.attributes_text(op) for op in (*twins, kept)]
    assert texts[0] == texts[1] != texts[2]
    texts = [copying.attributes_text(op) for op in constants]
    assert texts[0] == texts[1] != texts[2]
