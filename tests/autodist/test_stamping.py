# SPDX-License-Identifier: Apache-2.0
"""Copies of ops compute the same from other inputs and on other devices."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator.autodist import stamping
from tests.helpers import v1_control_flow

v1 = tf.compat.v1


def _press(graph, ops, target, given=(), scope="copy/", others=(), called=None):
    """Returns the copies of ops on device CPU:1 of a graph."""
    places = dict(given)
    stamp = stamping.Stamp(graph, ops)
    return stamp.press(
        *(target, scope, lambda t: places[t.op]),
        *(lambda op: "/device:CPU:1", dict(others), called),
    )


def test_copies_compute_the_same_of_what_is_in_the_places_of_others() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.constant([1.0, 2.0], name="x")
        top, places = tf.math.top_k(tf.sqrt(x) + x, name="top")
        ops = [op for op in graph.get_operations() if op is not x.op]
    with tf.Graph().as_default() as target, v1.Session() as session:
        new = _press(graph, ops, target, {x.op: tf.constant([9.0, 4.0])})
        assert session.run(stamping.of(new, top)).tolist() == [12.0]
        assert session.run(stamping.of(new, places)).tolist() == [0]
    assert set(new) == set(ops)
    for op, copy in new.items():
        assert copy.name == f"copy/{op.name}" and copy.type == op.type
        assert copy.device == "/device:CPU:1"
        assert errors.line_of(copy) == errors.line_of(op)
        assert [o.shape for o in copy.outputs] == [o.shape for o in op.outputs]


def test_copies_wait_for_copies_and_for_what_others_have_become() -> None:
    with tf.Graph().as_default() as graph:
        outside, gone, inside = (tf.no_op(name) for name in ("out", "gone", "in"))
        with tf.control_dependencies([outside, gone, inside]):
            last = tf.no_op("last")
    with tf.Graph().as_default() as target:
        other = tf.no_op("other")
        new = _press(graph, [inside, last], target, others={outside: other})
    assert set(new[last].control_inputs) == {other, new[inside]}


def test_nothing_is_copied_of_no_ops_and_one_stamp_makes_many_copies() -> None:
    with tf.Graph().as_default() as graph:
        constant = tf.constant(3.0, name="made")
        with tf.compat.v1.colocate_with(constant):
            double = constant * 2
        stamp = stamping.Stamp(graph, graph.get_operations())
        empty = stamping.Stamp(graph, [])
    with tf.Graph().as_default() as target, v1.Session() as session:
        assert empty.press(target, "", lambda t: t, lambda op: "", {}) == {}
        for scope in ("", "a/", "b/"):
            new = stamp.press(target, scope, lambda t: t, lambda op: "", {})
            assert new[constant.op].name == f"{scope}made"
            assert not new[double.op].colocation_groups()[0].startswith(b"loc:@made")
            assert session.run(stamping.of(new, double)) == 6


def test_loops_of_tensorflow_1_are_loops_of_their_own() -> None:
    with v1_control_flow(), tf.Graph().as_default() as graph:
        (turns,) = tf.nest.flatten(
            tf.while_loop(lambda k: k < 5, lambda k: k + 2, [0], name="loop")
        )
        ops = graph.get_operations()
    with tf.Graph().as_default() as target, v1.Session() as session:
        copies = [_press(graph, ops, target, scope=scope) for scope in ("a/", "b/")]
        actual = session.run([stamping.of(new, turns) for new in copies])
    assert actual == [6, 6]
    frames = {
        op.get_attr("frame_name")
        for op in target.get_operations()
        if op.type == "Enter"
    }
    assert len(frames) == 2


def test_copies_call_other_functions_where_one_is_named() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.constant(3.0)
        two, three = (tf.function(lambda x, k=k: x * k)(x) for k in (2.0, 3.0))
        requests = []

        def called(op: tf.Operation, name: str) -> str:
            requests.append((op, name))
            return three.op.get_attr("f").name

        new = _press(graph, [two.op], graph, {x.op: x}, called=called)
        with v1.Session() as session:
            assert session.run(stamping.of(new, two)) == 9
    assert requests == [(two.op, two.op.get_attr("f").name)]


def test_handles_are_known_to_be_of_the_same_variables() -> None:
    with tf.Graph().as_default() as graph:
        v = v1.get_variable("v", [2, 3], use_resource=True)
        passed = tf.identity(v.handle)
    with tf.Graph().as_default() as target:
        new = _press(graph, [v.handle.op, passed.op], target)
        handle = stamping.of(new, passed)
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    np.testing.assert_array_equal(read.shape, [2, 3])
