# SPDX-License-Identifier: Apache-2.0
"""A session has a step for each combination of fetches and feeds, built once."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import strategy
from tests.autodist import helpers
from tests.autodist.test_session import scope

v1 = tf.compat.v1
X = np.arange(14, dtype=np.float32).reshape(7, 2)


def _size(session: Any) -> int:
    """Returns how many ops the graph of all replicas has."""
    return len(session._steps.graph.get_operations())


def _trained() -> tuple[Any, ...]:
    """Returns a placeholder, a variable, a loss and a training op."""
    x = v1.placeholder(tf.float32, [None, 2], "x")
    w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
    loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
    return x, w, loss, v1.train.AdamOptimizer(0.1).minimize(loss)


def test_a_combination_is_built_once():
    with scope(2) as autodist:
        x, w, loss, train = _trained()
        session = autodist.create_distributed_session()
        sizes = []
        for feed in (X, X[:4], X[:5] + 1, X.tolist()):
            session.run([loss, train], {x: feed})
            sizes.append(_size(session))
        assert len(set(sizes)) == 1
        session.run({"loss": "x:0", "other": train}, {"x:0": X})  # another
        assert _size(session) > sizes[0]
        sizes = [_size(session)]
        for fetches in ([loss, train], (loss, [train]), {"a": loss, "b": train.name}):
            session.run(fetches, {"x:0": X})
            sizes.append(_size(session))
        assert len(set(sizes)) == 1


def test_batches_of_other_patterns_have_steps_of_their_own():
    def run(begin):
        x, y = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
        session, fetch = begin(), tf.reduce_sum(x) * tf.reduce_mean(y)
        shapes = (4, 4), (4, 5), (6, 6), (1, 4), (7, 3), (5, 4)
        return [session.run(fetch, {x: np.ones(n), y: np.ones(m)}) for n, m in shapes]

    assert helpers.in_sessions(run) == [4, 4, 6, 1, 7, 5]


def test_the_users_graph_stays_as_it_was():
    with scope(2) as autodist:
        x, w, loss, train = _trained()
        session = autodist.create_distributed_session()
        graph = session.graph
        before = graph.as_graph_def(add_shapes=True)
        session.run([loss, train, w], {x: X})
        assert graph.as_graph_def(add_shapes=True) == before


def _one_shot() -> Any:
    data = tf.data.Dataset.range(9)
    return v1.data.make_one_shot_iterator(data).get_next(), []


def _initializable() -> Any:
    iterator = v1.data.make_initializable_iterator(tf.data.Dataset.range(9))
    return iterator.get_next(), [iterator.initializer]


def _queue() -> Any:
    queue = tf.queue.FIFOQueue(9, [tf.int64], [[]])
    return queue.dequeue(), [queue.enqueue_many([tf.range(9, dtype=tf.int64)])]


@pytest.mark.parametrize("make", [_one_shot, _initializable, _queue])
def test_steps_pull_from_the_same(make):
    def run(begin):
        pulled, prepare = make()
        other = pulled * 10
        session = begin()
        session.run(prepare)
        fetches = pulled, other, [pulled, other], pulled
        return [session.run(one) for one in fetches]

    assert helpers.in_sessions(run) == [0, 10, [2, 20], 3]


def test_steps_have_the_same_tables():
    def run(begin):
        x = v1.placeholder(tf.int64, [None])
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
        write, found = table.insert(x, x * x), table.lookup(x)
        session = begin()
        values = []
        for given in ([1, 2, 3], [3, 4, 5], [5]):
            values.append(session.run(found, {x: given}))
            session.run(write, {x: given})
            values.append(session.run([found, table.size()], {x: given}))
        return values

    *_, (last, size) = helpers.in_sessions(run)
    assert last.tolist() == [25] and size == 5


@pytest.mark.parametrize("plan", ["mirrored", strategy.PS(), strategy.PartitionedPS()])
def test_a_step_that_is_built_later_has_the_variables_of_before(plan):
    def run(begin):
        x, w, loss, train = _trained()
        session = begin()
        values = [session.run([loss, train], {x: X[:n]})[0] for n in (7, 4)]
        later = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        values += [session.run([w, tf.matmul(x, w)], {x: X})]
        values += [session.run([loss, later, train], {x: X})[0]]
        return [*values, session.run(w)]

    helpers.in_sessions(run, 2, 3, strategy=plan)


def test_what_is_built_behind_the_session_runs_too():
    def run(begin):
        x = v1.placeholder(tf.float32, [None])
        w = tf.Variable(2.0)
        session = begin()
        feed = {x: [1.0, 2.0, 6.0]}
        slopes = tf.gradients(tf.reduce_mean(w * x * x), [x, w])
        values = [session.run(one, feed) for one in (w * x, slopes, tf.sort(-x))]
        session.run(w.assign_sub(slopes[1]), feed)
        return [*values, session.run(w)]

    helpers.in_sessions(run)


def test_variables_made_after_the_session_are_initialized_by_the_user():
    def run(begin):
        x = v1.placeholder(tf.float32, [None, 2])
        w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
        loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
        session = begin()
        before = session.run(loss, {x: X})
        scale = v1.get_variable("scale", initializer=3.0)
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(scale * loss)
        made = set(v1.global_variables()) - {w}
        session.run([v.initializer for v in made])
        for _ in range(2):
            session.run(train, {x: X / 10})
        return [before, session.run([w, scale]), len(made)]

    helpers.in_sessions(run)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_threads_run_the_same_session(num_replicas):
    with scope(num_replicas) as autodist:
        x = v1.placeholder(tf.float32, [None], "x")
        total = tf.Variable(0.0)
        add = total.assign_add(tf.reduce_sum(x)).op
        rows = [x * k for k in range(4)]
        session = autodist.create_distributed_session()

        def run(k):
            feed = {x: np.arange(5.0) + k}
            session.run(add, feed)
            return session.run(rows[k % 4], feed)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(run, range(12)))
        for k, rows_of_k in enumerate(found):
            np.testing.assert_allclose(rows_of_k, (np.arange(5.0) + k) * (k % 4))
        assert session.run(total) == sum(10 + 5 * k for k in range(12))


def test_sessions_of_one_scope_are_apart():
    with scope(2) as autodist:
        w = tf.Variable(1.0)
        add = w.assign_add(1.0).op
        one, two = (autodist.create_distributed_session() for _ in range(2))
        one.run(add)
        one.run(add)
        two.run(add)
        assert (one.run(w), two.run(w)) == (3, 2)
