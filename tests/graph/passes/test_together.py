# SPDX-License-Identifier: Apache-2.0
"""Gradients that are taken one by one share a bucket, unless one needs another."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.graph.ir import placeholder
from replicator.graph.ir.placeholder import TOGETHER, Call, Value
from replicator.graph.passes import together
from tests.autodist import helpers

X = np.random.default_rng(0).normal(size=[6, 2]).astype(np.float32)


def _by_itself(v, w, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x * v + w) ** 2)
    return tape.gradient(loss, [v, w])


def _after_another(v, w, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x * v) ** 2)
    (first,) = tape.gradient(loss, [v])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(x * w) * tf.reduce_sum(first)
    return [first, tape.gradient(loss, w)]


def _in_order(v, w, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x * v) ** 2)
    (first,) = tape.gradient(loss, [v])
    with tf.control_dependencies([first]), tf.GradientTape() as tape:
        loss = tf.reduce_mean((x * w) ** 2)
        return [first, tape.gradient(loss, w)]


@pytest.mark.parametrize(
    ("gradients", "calls"),
    [(_by_itself, 1), (_after_another, 2), (_in_order, 2)],
)
def test_what_needs_nothing_of_another_travels_with_it(gradients, calls):
    autodist = helpers.make(2)
    with autodist.scope():
        v, w = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    actual = autodist.function(lambda x: gradients(v, w, x))(X)
    expected = gradients(v, w, tf.constant(X))
    for own, one in zip(actual, expected, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5)
    assert len(list(autodist.replicator.plan)) == calls


def _updated_between(v, w, x):
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean((x * v + w) ** 2)
    first = tape.gradient(loss, v)
    v.assign_sub(first)  # effects keep the order in which they were built
    second = tape.gradient(loss, w) + 0 * v
    w.assign_sub(second)
    return [first, second]


def _clipped_between(v, w, x):
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean((x * v + w) ** 2)
    first = tf.clip_by_norm(tape.gradient(loss, v), 0.1)  # delayed, not lost
    return [first, tape.gradient(loss, w)]


@pytest.mark.parametrize("build", ["clone", "trace"])
@pytest.mark.parametrize(
    ("gradients", "calls"), [(_updated_between, 2), (_clipped_between, 1)]
)
def test_what_stands_between_keeps_its_place(gradients, calls, build):
    autodist = replicator.AutoDist(["CPU:0", "CPU:1", "CPU:2"], build=build)
    with autodist.scope():
        v, w = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    actual = autodist.function(lambda x: gradients(v, w, x))(X)
    alone = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    expected = gradients(*alone, tf.constant(X))
    for own, one in zip([*actual, v, w], [*expected, *alone], strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5)
    rows = list(autodist.replicator.plan)
    assert len([row for row in rows if TOGETHER in row.options]) == calls


def _built(graph):
    """Returns the ops of a replica that calls for each of four values, in order."""
    with graph.as_default(), tf.name_scope("replica_0/"):
        x = tf.constant([1.0, 2.0])
        first = _call(0, x)
        double = first * 2
        second = _call(1, x + 1)
        third = _call(2, double)  # needs the first
        fourth = _call(3, third)  # needs the third
        tf.add_n([first, second, third, fourth], name="all")
    return graph.get_operations()


def _call(key, x):
    value = Value.of(x)
    call = Call(
        *("all_reduce", {"op": "sum", TOGETHER: True}, 0, "CPU:0", (0,), str(key)),
        *((value,), (value,), "line"),
    )
    return tf.identity(placeholder.put(call, [x], [value]).outputs[0])


def test_ops_stay_in_an_order_in_which_each_comes_after_what_it_needs():
    graph = tf.Graph()
    ops = _built(graph)
    with graph.as_default():
        joined = together.join(ops, "replica_0/")
    place = {op: n for n, op in enumerate(joined)}
    for op in joined:
        assert all(place[tensor.op] < place[op] for tensor in op.inputs)
    calls = [placeholder.read(op) for op in joined]
    assert [len(call.operands) for call in calls if call] == [2, 1, 1]
    assert [call.key for call in calls if call] == ["0", "2", "3"]
    left = set(ops) - set(joined)
    assert {op.type for op in left} == {placeholder.TYPE}
    assert not any(output.consumers() for op in left for output in op.outputs)
