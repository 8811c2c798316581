# SPDX-License-Identifier: Apache-2.0
"""What is written to variables is what one device writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import strategy
from tests.autodist import helpers
from tests.autodist.test_session import scope

v1 = tf.compat.v1
N = np.arange(1, 8)
# The method, the value from the examples, and the result for a variable that was 10.
WRITES = {
    "a mean": ("assign", tf.reduce_mean, tf.float32, 4),
    "a sum": ("assign_add", tf.reduce_sum, tf.float32, 38),
    "whole numbers": ("assign_add", tf.reduce_sum, tf.int64, 38),
    "how many": ("assign_add", lambda x: tf.size(x, tf.int64), tf.int64, 17),
    "a maximum": ("assign", tf.reduce_max, tf.int32, 7),
    "a minimum": ("assign_sub", tf.reduce_min, tf.float32, 9),
    "the first": ("assign", lambda x: x[0], tf.int32, 1),
    "the last but one": ("assign", lambda x: x[-2], tf.int32, 6),
    "computed of a mean": ("assign", lambda x: tf.reduce_mean(x) ** 2, tf.float32, 16),
    "a moving average": (
        "assign_sub",
        lambda x: 0.5 * (10.0 - tf.reduce_mean(x)),
        *(tf.float32, 7),
    ),
    "complex": ("assign", tf.reduce_mean, tf.complex64, 4 + 4j),
    "of complex means": (
        *("assign", lambda x: tf.reduce_mean(x) ** 2),
        *(tf.complex64, (4 + 4j) ** 2),
    ),
}


@pytest.mark.parametrize("plan", ["mirrored", strategy.PS()])
def test_what_is_written_is_that_of_one_device(plan):
    with scope(3, plan) as autodist:
        given, written, made = {}, [], []
        for method, make, dtype, _ in WRITES.values():
            x = v1.placeholder(dtype, [None])
            given[x] = N * (1 + 1j) if dtype.is_complex else N
            made.append(tf.Variable(tf.constant(10, dtype)))
            written.append(getattr(made[-1], method)(make(x)).op)
        session = autodist.create_distributed_session()
        session.run(written, given)
        results = dict(zip(WRITES, session.run(made), strict=True))
    for name, (*_, expected) in WRITES.items():
        np.testing.assert_allclose(results[name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_what_a_variable_is_made_with_for_replicas_changes_nothing(
    aggregation, synchronization
):
    def run(begin):
        x = v1.placeholder(tf.float32, [None])
        total = tf.Variable(
            0.0,
            trainable=False,
            aggregation=getattr(tf.VariableAggregation, aggregation),
            synchronization=getattr(tf.VariableSynchronization, synchronization),
        )
        write, session = total.assign_add(tf.reduce_max(x)).op, begin()
        for values in ([1.0, 2.0, 5.0], [4.0, 3.0]):
            session.run(write, {x: values})
        return session.run(total)

    assert helpers.in_sessions(run) == 9


def test_what_gradients_lead_to_is_that_of_all_examples():
    def run(begin):
        x, ids = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.int32, [None])
        w, table = tf.Variable(2.0), tf.Variable(np.ones([4, 1], np.float32))
        losses = tf.reduce_sum(w * x), tf.reduce_mean(tf.gather(table, ids) ** 2)
        slopes = [
            tf.gradients(*pair)[0] for pair in zip(losses, (w, table), strict=True)
        ]
        train = [
            v.assign_sub(tf.convert_to_tensor(g)).op
            for v, g in zip((w, table), slopes, strict=True)
        ]
        session = begin()
        feeds = {x: N, ids: [3, 0, 3, 1, 3, 3, 1]}
        first = session.run(slopes[0], feeds)
        session.run(train, feeds)
        return [first, *session.run([w, table])]

    assert helpers.in_sessions(run)[:2] == [28, 2 - 28]


BRANCHES: dict[str, Callable[..., Any]] = {
    "an element": lambda v, x: tf.cond(
        tf.reduce_mean(x) > 0, lambda: v.assign(tf.reduce_mean(x)) + 0, lambda: 0.0
    ),
    "turns": lambda v, x: tf.while_loop(
        lambda k: k < 3,
        lambda k: k + 1 + 0 * tf.cast(v.assign_add(tf.reduce_sum(x)), tf.int32),
        [0],
    ),
    "by the value": lambda v, x: tf.cond(
        v > 3.0, lambda: v.assign_sub(1.0) + 0, lambda: v.assign_add(x[0]) + 0
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("plan", ["mirrored", strategy.PS()])
def test_what_control_flow_writes_is_that_of_one_device(name, plan):
    def run(begin):
        x, v = v1.placeholder(tf.float32, [None]), tf.Variable(0.5)
        written, session, values = BRANCHES[name](v, x), begin(), []
        for n in (7, 2, 1):
            session.run(written, {x: np.arange(2.0, n + 2)})
            values.append(session.run(v))
        return values

    helpers.in_sessions(run, 2, 3, strategy=plan)


def test_writes_by_what_may_differ_are_the_same_on_all_replicas():
    with scope(3, "mirrored") as autodist:
        v, w = tf.Variable(0.0), tf.Variable(0.0)
        now = tf.cast(tf.timestamp(), tf.float32)
        write = [v.assign(now).op, w.assign(tf.random.uniform([])).op]
        session = autodist.create_distributed_session()
        session.run(write)
        assert 0 < session.run(w) < 1 and session.run(v) > 0
        for own in (v, w):
            made = session._steps._variables.made[own.op]
            with session._steps.graph.as_default():
                reads = [one.read_value() for one in made.components]
            assert len(set(session._steps.session.run(reads))) == 1
