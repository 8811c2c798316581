# SPDX-License-Identifier: Apache-2.0
"""Replicas replay a graph for one device: what it computes, writes and communicates."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from replicator.forms import engine
from replicator.forms.forms import Fact
from replicator.forms.propagate import GraphPlan, Scope
from tests.forms import helpers

BATCH = [tf.TensorSpec([None, 3])]
PAIR = [tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3])]
W = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32) / 3


def weight() -> tf.Variable:
    return tf.Variable(W)


def returning(function: Any) -> Any:
    """Makes a function without variables."""
    return lambda: (function, [])


def test_sums_that_can_be_computed_at_the_same_time_are_one_message():
    def moments(x):
        sums = [tf.reduce_sum(x), tf.reduce_sum(x**2, 0), tf.reduce_sum(tf.exp(x), 1)]
        first, second = tf.exp(sums[0] / 50), tf.exp(sums[1] / 50)
        return first, second, sums[2]

    _, repl = helpers.run(returning(moments), BATCH, [7])
    assert helpers.primitives(repl) == ["all_reduce"]


def test_what_is_gathered_at_the_same_time_is_one_message():
    def sorted_both(x, y):
        return tf.sort(tf.exp(x), 0), tf.sort(tf.sin(y), 0)

    _, repl = helpers.run(returning(sorted_both), PAIR, [7])
    assert helpers.primitives(repl) == ["all_gather"]


def test_a_sum_of_a_sum_is_a_second_message():
    def normalized(x):
        centred = x - tf.reduce_mean(x, 0)
        return tf.exp(tf.reduce_mean(centred**2))

    _, repl = helpers.run(returning(normalized), BATCH, [7, 4])
    assert helpers.primitives(repl) == ["all_reduce", "all_reduce"]


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_any_number_of_rows_is_divided_among_three_replicas(rows):
    def softmax(x):
        return tf.nn.softmax(x @ W), tf.reduce_mean(x, 0), tf.shape(x)

    helpers.run(returning(softmax), BATCH, [rows], replicas=3)
    helpers.run(returning(softmax), BATCH, [rows], replicas=3, empty=True)


def test_batches_of_two_lengths_and_lengths_computed_from_both():
    def joined(x, y):
        both = tf.concat([x, y], 0)
        return tf.reduce_mean(both), both, tf.shape(x)[0] - tf.shape(y)[0]

    repl = replicator.Replicator(helpers.devices(2))
    run = engine.WholeBatchFunction(joined, repl, PAIR)
    for rows in ((7, 4), (4, 4), (5, 6)):
        x, y = (helpers.batch(BATCH, n)[0] for n in rows)
        for have, want in zip(run(x, y), joined(x, y), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-5)


def test_reads_and_writes_keep_their_order_whatever_waits_for_a_message():
    def make():
        v = tf.Variable(tf.zeros([3]))

        def step(x):
            before = v + 0.0
            v.assign_add(tf.reduce_max(x, 0))  # waits for a message
            between = 2 * v
            v.assign(-v)  # does not
            v[0].assign(tf.reduce_sum(x))
            return before, between, v + 1.0

        return step, [v]

    helpers.run(make, BATCH, [7, 4, 2])


def test_what_is_printed_is_printed_once(capfd):
    def printing(x):
        tf.print("the sum is", tf.reduce_sum(x))
        return tf.reduce_mean(x)

    repl = replicator.Replicator(helpers.devices(3))
    run = engine.WholeBatchFunction(printing, repl, BATCH)
    run(np.ones([6, 3], np.float32))
    assert capfd.readouterr().err.count("the sum is 18") == 1


def test_an_op_with_state_and_no_rule_runs_on_one_replica():
    calls: list[Any] = []

    def counted(x):
        (n,) = tf.py_function(
            lambda x: [calls.append(len(x)) or len(x)], [x], [tf.int32]
        )
        return n, x

    repl = replicator.Replicator(helpers.devices(3))
    run = engine.WholeBatchFunction(counted, repl, BATCH)
    n, x = run(np.ones([7, 3], np.float32))
    assert (int(n), calls, x.shape) == (7, [7], [7, 3])


def _looped(x, w):
    return tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x)
    )[1]


def _mapped(x, w):
    return tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row)), x)


def _scanned(x, w):
    return tf.scan(lambda h, x: tf.tanh(h @ w + x), tf.stack([x] * 3), tf.zeros_like(x))


def _branched(x, w):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x @ w), lambda: tf.sin(x @ w))


@pytest.mark.parametrize("flow", [_looped, _mapped, _scanned, _branched])
def test_second_derivatives_pass_through_control_flow(flow):
    def make():
        w = weight()

        def step(x):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    total = tf.reduce_sum(flow(x, w) ** 2)
                slopes = inner.gradient(total, x)
                penalty = tf.reduce_mean(tf.reduce_sum(slopes**2, 1)) + total
            w.assign_sub(0.01 * outer.gradient(penalty, w))
            return penalty

        return step, [w]

    helpers.run(make, BATCH, [7, 4])


def test_ctc_loss_whose_functions_only_the_runtime_knows():
    def make():
        w = weight()

        def step(x):
            sizes = tf.fill([tf.shape(x)[0]], 2)
            labels = tf.ones([tf.shape(x)[0], 2], tf.int32)
            with tf.GradientTape() as tape:
                logits = tf.stack([x @ w] * 4)
                losses = tf.nn.ctc_loss(labels, logits, sizes, 2 * sizes, blank_index=0)
                loss = tf.reduce_mean(losses)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step, [w]

    _, repl = helpers.run(make, BATCH, [7])
    lines = [line for row in repl.plan for line in row.lines]
    assert lines and all("test_replay.py" in line for line in lines)


def test_a_loop_communicates_only_if_its_body_does():
    def recurrent(x):
        return _looped(x, W)

    _, repl = helpers.run(returning(recurrent), BATCH, [7])
    assert helpers.primitives(repl) == []


def test_an_error_bears_the_line_of_the_op():
    def step(x):
        shape = tf.constant([-1, 3])
        items = tf.raw_ops.TensorListReserve(
            element_shape=shape, num_elements=1, element_dtype=tf.float32
        )
        items = tf.raw_ops.TensorListSetItem(input_handle=items, index=0, item=x)
        more = tf.raw_ops.TensorListPushBackBatch(  # the op
            input_handles=tf.expand_dims(items, 0), tensor=tf.zeros([1, 4, 3])
        )
        return tf.raw_ops.TensorListLength(input_handle=more[0])

    repl = replicator.Replicator(helpers.devices(2))
    run = engine.WholeBatchFunction(step, repl, BATCH)
    lines, first = inspect.getsourcelines(step)
    number = next(k for k, line in enumerate(lines) if "# the op" in line)
    with pytest.raises(errors.UnsupportedError) as raised:
        run(np.ones([4, 3], np.float32))
    assert "a list of tensors" in str(raised.value)
    assert f"test_replay.py:{first + number} in step" in str(raised.value)


def test_ops_that_compute_the_same_are_built_once():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [3])
        first, twin = tf.exp(x), tf.exp(x)
        doubled, again = 2 * first, 2 * twin
        other, drawn = tf.sin(x), [tf.random.uniform([2]) for _ in range(2)]
        with tf.control_dependencies([other]):
            later = tf.exp(x)
    plan = GraphPlan([x], [Fact()])
    targets = [doubled, again, other, later, *drawn]
    Scope().extend(plan, [t.op for t in targets])
    found = plan.twins
    assert found.first(again) == found.first(doubled)
    assert found.first(twin) == found.first(first)
    made = found.first(twin).deref().op
    (taken,) = {first.op, twin.op} - {made}
    assert made in plan.before(taken)
    assert found.first(later) != found.first(first)
    assert found.first(drawn[0]) != found.first(drawn[1])


def test_a_gradient_that_is_used_twice_is_sent_once():
    def make():
        table = tf.Variable(W)

        def step(x):
            ids = tf.argmax(x, 1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table, ids) ** 2 + x)
            slopes = tape.gradient(loss, table)
            for _ in range(2):  # each use makes a tensor of its own of the slices
                table.assign_sub(0.1 * tf.convert_to_tensor(slopes))
            return loss

        return step, [table]

    _, repl = helpers.run(make, BATCH, [7])
    (row,) = (row for row in repl.plan if row.primitive == "all_reduce")
    assert sum(link.nbytes for link in row.links) <= 4 * (9 + 1) * 2
