# SPDX-License-Identifier: Apache-2.0
"""Elements are dealt to the replicas of a session, and are arguments of functions."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests.autodist import helpers

v1 = tf.compat.v1
X = np.random.default_rng(0).normal(size=[10, 3]).astype(np.float32)


def _iterator(batch=2):
    data = tf.data.Dataset.from_tensor_slices(X).batch(batch)
    return v1.data.make_one_shot_iterator(data)


WAYS = {
    "conditional": lambda train: v1.cond(
        train, _iterator().get_next, _iterator(3).get_next
    ),
    "function": lambda train: tf.function(_iterator().get_next)(),
    "function in a function": lambda train: tf.function(
        lambda iterator: tf.function(iterator.get_next)()
    )(_iterator()),
}


@pytest.mark.parametrize("way", WAYS)
def test_elements_are_dealt_wherever_they_are_pulled(way):
    outcomes = []
    for pull in (WAYS[way], lambda train: _iterator().get_next()):
        with tf.Graph().as_default(), helpers.make(2).scope() as autodist:
            x = pull(v1.placeholder_with_default(True, []))
            w = v1.get_variable("w", [3, 1], initializer=v1.ones_initializer())
            loss = tf.reduce_mean((x @ w - 1.0) ** 2)
            train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
            session = autodist.create_distributed_session()
            steps = [session.run([x, loss, train_op])[:2] for _ in range(2)]
            outcomes.append((steps, session.run(w)))
    np.testing.assert_array_equal(outcomes[0][0][1][0], X[4:8])
    for a, b in zip(*map(tf.nest.flatten, outcomes), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_queues_are_asked_in_the_order_of_the_replicas():
    with tf.Graph().as_default(), helpers.make(2).scope() as autodist:
        queue = tf.queue.FIFOQueue(20, [tf.float32], [[3]])
        rows = v1.placeholder(tf.float32, [None, 3])
        put = queue.enqueue_many([rows])
        test = v1.placeholder_with_default(True, [])
        x = v1.cond(
            *(test, lambda: queue.dequeue_many(2), lambda: queue.dequeue_many(1))
        )
        session = autodist.create_distributed_session()
        session.run(put, {rows: X})
        for begin in (0, 4):
            np.testing.assert_array_equal(session.run(x), X[begin : begin + 4])


def test_what_returns_no_element_cannot_be_counted():
    with tf.Graph().as_default(), helpers.make(2).scope() as autodist:
        iterator = _iterator(4)
        mean = tf.function(lambda: tf.reduce_mean(iterator.get_next(), 0))()
        w = v1.get_variable("w", [3])
        loss = tf.reduce_sum(w * mean)
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with pytest.raises(
            replicator.UnsupportedError, match=r"(?s)returns none.*test_pulled.*Fix"
        ):
            autodist.create_distributed_session()


def test_optional_elements_are_refused():
    with tf.Graph().as_default(), helpers.make(2).scope() as autodist:
        _iterator().get_next_as_optional()
        with pytest.raises(
            replicator.UnsupportedError, match=r"(?s)AsOptional.*test_pulled.*get_next"
        ):
            autodist.create_distributed_session()


@pytest.mark.parametrize("where", ["function", "branch", "argument"])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_functions_pull_what_one_device_pulls(where, num_replicas):
    iterator = iter(tf.data.Dataset.from_tensor_slices(X).batch(2))

    @helpers.make(num_replicas).function
    def total(x, pulled=iterator):
        if where == "branch":
            return tf.cond(
                tf.shape(X)[0] > 2, lambda: tf.reduce_sum(next(iterator)), lambda: 0.0
            )
        return tf.reduce_sum(next(pulled))

    for k in range(2):
        sums = total(X, iterator) if where == "argument" else total(X)
        np.testing.assert_allclose(sums, X[2 * k : 2 * k + 2].sum(), rtol=1e-5)


def test_functions_may_have_datasets_of_their_own():
    data = tf.data.Dataset.from_tensor_slices(X).batch(4)

    @helpers.make(2).function
    def total(x):
        result = tf.reduce_sum(next(iter(data)))
        for rows in data:
            result += tf.reduce_sum(rows)
        return result + tf.reduce_mean(x)

    expected = X[:4].sum() + X.sum() + X.mean()
    np.testing.assert_allclose(total(X), expected, rtol=1e-5)


def test_loops_over_an_iterator_of_the_function_leave_it_split(caplog):
    @helpers.make(2).function
    def scaled(x):
        iterator = iter(tf.data.Dataset.range(1, 4))
        for _ in tf.range(3):
            x *= tf.cast(next(iterator), tf.float32)
        return tf.reduce_mean(x)

    np.testing.assert_allclose(scaled(X), X.mean() * 6, rtol=1e-5)
    assert "not split" not in caplog.text
