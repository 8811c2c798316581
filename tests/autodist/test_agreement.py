# SPDX-License-Identifier: Apache-2.0
"""Writes that depend on the examples equal those of one device."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import replicator
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


def test_what_is_written_is_that_of_one_device() -> None:
    with scope(3) as autodist:
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


def test_a_variable_whose_writes_add_up_has_the_sum_of_all() -> None:
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None])
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        write = total.assign_add(tf.reduce_max(x))  # of each replica's examples
        session = autodist.create_distributed_session()
        session.run(write.op, {x: [1.0, 2.0, 5.0]})
        assert session.run(total) == 7


def test_what_is_known_of_no_batch_is_refused_by_variable_and_line() -> None:
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None])
        tf.Variable(0.0, name="v").assign(x[0] + tf.random.uniform([]))
        with pytest.raises(
            replicator.UnsupportedError,
            match=r"(?s)variable v is assigned.*test_agreement\.py:\d+ in.*Fix",
        ):
            autodist.create_distributed_session()


def test_what_gradients_lead_to_is_that_of_all_examples() -> None:
    with scope(3) as autodist:
        x = v1.placeholder(tf.float32, [None])
        ids = v1.placeholder(tf.int32, [None])
        w, table = tf.Variable(2.0), tf.Variable(np.ones([4, 1], np.float32))
        losses = tf.reduce_sum(w * x), tf.reduce_mean(tf.gather(table, ids) ** 2)
        slopes = [
            tf.gradients(*pair)[0] for pair in zip(losses, (w, table), strict=True)
        ]
        train = [
            v.assign_sub(tf.convert_to_tensor(g)).op
            for v, g in zip((w, table), slopes, strict=True)
        ]
        session = autodist.create_distributed_session()
        feeds = {x: N, ids: [3, 0, 3, 1, 3, 3, 1]}
        assert session.run(slopes[0], feeds) == 28
        session.run(train, feeds)
        actual = session.run([w, table])
    assert actual[0] == 2 - 28
    expected = 1 - 2 * np.array([[1], [2], [0], [4]]) / 7
    np.testing.assert_allclose(actual[1], expected, rtol=1e-6)
