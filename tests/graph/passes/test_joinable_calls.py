# SPDX-License-Identifier: Apache-2.0
"""Values that are reduced one by one share a message, unless one needs another."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.graph.ir import placeholder
from replicator.graph.ir.placeholder import Call, Value
from replicator.graph.passes import joinable_calls
from tests.autodist import helpers

THREE = ["CPU:0", "CPU:1", "CPU:2"]
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
    # A replica waits for its own summand.
    with tf.control_dependencies([first]), tf.GradientTape() as tape:
        loss = tf.reduce_mean((x * w) ** 2)
        return [first, tape.gradient(loss, w)]


def _known(sums):
    """Needs sums in the step: the caller adds up those that are only returned."""
    return [tf.abs(one) for one in sums]


@pytest.mark.parametrize(
    ("gradients", "calls"),
    [(_by_itself, 1), (_after_another, 2), (_in_order, 1)],
)
def test_what_needs_nothing_of_another_travels_with_it(gradients, calls):
    autodist = helpers.make(2)
    with autodist.scope():
        v, w = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    actual = autodist.function(lambda x: _known(gradients(v, w, x)))(X)
    expected = _known(gradients(v, w, tf.constant(X)))
    for own, one in zip(actual, expected, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5)
    assert len(list(autodist.replicator.plan)) == calls


def _updated_between(v, w, x):
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean((x * v + w) ** 2)
    first = tape.gradient(loss, v)
    v.assign_sub(first)  # effects keep the order in which they were built
    second = tape.gradient(loss, w) * v  # as it is by then
    w.assign_sub(second)  # what replicas write is the same: no call of its own
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
    autodist = replicator.AutoDist(THREE, build=build)
    with autodist.scope():
        v, w = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    actual = autodist.function(lambda x: _known(gradients(v, w, x)))(X)
    alone = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    expected = _known(gradients(*alone, tf.constant(X)))
    for own, one in zip([*actual, v, w], [*expected, *alone], strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5)
    assert len(list(autodist.replicator.plan)) == calls


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
        *("all_reduce", {"op": "sum"}, 0, "CPU:0", (0,), str(key)),
        *((value,), (value,), "line"),
        joinable=True,
    )
    return tf.identity(placeholder.put(call, [x], [value]).outputs[0])


def test_ops_stay_in_an_order_in_which_each_comes_after_what_it_needs():
    graph = tf.Graph()
    ops = _built(graph)
    with graph.as_default():
        (joined,) = joinable_calls.join([ops], ["replica_0/"], lambda handle: None)
    place = {op: n for n, op in enumerate(joined)}
    for op in joined:
        assert all(place[tensor.op] < place[op] for tensor in op.inputs)
    calls = [placeholder.read(op) for op in joined]
    assert [len(call.operands) for call in calls if call] == [2, 1, 1]
    assert [call.key for call in calls if call] == ["0", "2", "3"]
    left = set(ops) - set(joined)
    assert {op.type for op in left} == {placeholder.TYPE}
    assert not any(output.consumers() for op in left for output in op.outputs)


# --- Assignments ----------------------------------------------------------------------
# All are linear in x, so that their means over replicas are what the mean of x gives.


def _averages(values, x):
    for k, v in enumerate(values):
        v.assign(0.9 * v + 0.1 * x[k])


def _chain(values, x):
    a, b, c = values
    a.assign(x[0])
    b.assign(a + x[1])  # reads what was just assigned
    c.assign_add(2.0 * b)


def _same_variable(values, x):
    a, b, _ = values
    a.assign(x[0])
    a.assign_sub(2.0 * x[1])
    b.assign(x[2])


def _read_afterwards(values, x):
    a, b, c = values
    a.assign(x[0])
    b.assign(x[1])
    c.assign(a * b)


def _read_before(values, x):
    a, b, c = values
    before = a + b
    a.assign(x[0])
    b.assign(before + x[1])
    c.assign(before + x[2])


def _function_between(values, x):
    a, b, c = values
    a.assign(x[0])
    tf.function(lambda: b.assign(a + 1.0))()
    c.assign(b + x[1])


def _condition_after(values, x):
    a, b, c = values
    a.assign(x[0])
    b.assign(x[1])
    c.assign(x[2])
    tf.cond(a > 100.0, lambda: a.assign(b + 1.0), lambda: a.assign(b - 1.0))


def _assertion_between(values, x):
    a, b, _ = values
    a.assign(x[0])
    tf.debugging.assert_less(x[0], 1e6)
    b.assign(x[1])


def _gradient_between(values, x):
    a, b, c = values
    with tf.GradientTape() as tape:
        loss = x[0] * c
    a.assign(x[1])
    b.assign(tape.gradient(loss, c))


# The numbers of values that travel together, in order.
_ASSIGNING = {
    _averages: [3],
    _chain: [1, 1, 1],
    _same_variable: [2, 1],
    _read_afterwards: [2, 1],
    _read_before: [3],
    _function_between: [1, 1, 1],
    _condition_after: [3, 1, 1],
    _assertion_between: [1, 1],
    _gradient_between: [2],
}


@pytest.mark.battery(3)
@pytest.mark.parametrize("build", ["clone", "trace"])
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
@pytest.mark.parametrize("assign", _ASSIGNING, ids=lambda assign: assign.__name__)
def test_assigned_values_travel_together_unless_one_needs_another(
    assign, variables, build
):
    repl = replicator.Replicator(THREE, variables=variables, build=build)
    with repl.context():
        values = [tf.Variable(float(k)) for k in range(3)]
    alone = [tf.Variable(float(k)) for k in range(3)]
    xs = tf.constant(np.random.default_rng(1).normal(size=[3, 3]), tf.float32)
    for _ in range(2):  # the second step starts from what the first has assigned
        repl.run(lambda x: assign(values, x), lambda ctx: xs[ctx.replica_id])
        assign(alone, tf.reduce_mean(xs, axis=0))
    for v, one in zip(values, alone, strict=True):
        np.testing.assert_allclose(v, one, rtol=1e-5)
    assert [len(row.operands[0]) for row in repl.plan] == _ASSIGNING[assign]


def test_what_parts_values_on_one_replica_parts_them_on_all():
    repl = replicator.Replicator(THREE)
    with repl.context():
        values = [tf.Variable(float(k)) for k in range(4)]

    def step():
        for k, v in enumerate(values):
            v.assign(float(k) + repl.replica_id)
            if repl.replica_id == k == 1:
                tf.debugging.assert_positive(v.read_value())

    repl.run(step)
    assert [v.numpy() for v in values] == [1.0, 2.0, 3.0, 4.0]
    assert [len(row.operands[0]) for row in repl.plan] == [2, 2]


def test_replicas_that_assign_to_different_variables_are_told_which():
    repl = replicator.Replicator(THREE)
    with repl.context():
        first, a, b = (tf.Variable(0.0, name=name) for name in ("first", "a", "b"))

    def step():
        first.assign(1.0 * repl.replica_id)
        (b if repl.replica_id == 2 else a).assign(1.0)

    with pytest.raises(replicator.MismatchError, match="a:0.assign and b:0.assign"):
        repl.run(step)


def test_a_row_of_the_plan_has_the_lines_of_all_its_values():
    repl = replicator.Replicator(THREE)
    with repl.context():
        a, b, c = (tf.Variable(0.0) for _ in range(3))

    def step():
        a.assign(1.0 * repl.replica_id)
        for v in (b, c):
            v.assign(2.0 * repl.replica_id)

    repl.run(step)
    (row,) = repl.plan
    start = inspect.getsourcelines(step)[1]
    numbers = [int(line.split(":")[-1].split()[0]) for line in row.lines]
    assert numbers == [start + 1, start + 3]


def test_batch_normalizations_share_a_message():
    repl = replicator.Replicator(THREE)
    with repl.context():
        layers = [tf.keras.layers.BatchNormalization() for _ in range(3)]
        model = tf.keras.Sequential([tf.keras.Input([2]), *layers])
    repl.run(lambda: tf.reduce_sum(model(X[repl.replica_id :], training=True)))
    (row,) = repl.plan
    assert len(row.operands[0]) == 6
