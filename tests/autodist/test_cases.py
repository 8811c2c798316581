# SPDX-License-Identifier: Apache-2.0
"""Programs of sessions that were once refused, or wrong, on replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import strategy
from tests.autodist import helpers

v1 = tf.compat.v1
ROWS = np.float32([1, 2, 3, 6])


def _sgd(loss: tf.Tensor, rate: float = 0.1) -> tf.Operation:
    return v1.train.GradientDescentOptimizer(rate).minimize(loss)


@pytest.mark.parametrize("plan", ["mirrored", strategy.PS(), strategy.PartitionedPS()])
def test_training_leaves_an_evaluations_data_alone(plan):
    def run(begin):
        rows = tf.data.Dataset.from_tensors(np.int32([0, 1, 2, 1])).repeat()
        ids = v1.data.make_one_shot_iterator(rows).get_next()
        others = tf.data.Dataset.from_tensor_slices(np.arange(12, dtype=np.int32))
        other = v1.data.make_one_shot_iterator(others.batch(1)).get_next()
        table = v1.get_variable("table", [12, 3], initializer=v1.ones_initializer())
        loss, _ = tf.reduce_mean(tf.gather(table, ids) ** 2), tf.gather(table, other)
        train, session = _sgd(loss), begin()
        for _ in range(3):
            session.run(train)
        return session.run([other, table])

    assert helpers.in_sessions(run, strategy=plan)[0].tolist() == [0]


@pytest.mark.battery(2)
@pytest.mark.parametrize("plan", ["mirrored", strategy.PS(), strategy.PartitionedPS()])
@pytest.mark.parametrize("kind", ["dense", "gathered"])
def test_training_needs_no_feed_for_an_evaluation(kind, plan):
    def run(begin):
        one, two = (v1.placeholder(tf.int32, [None], name) for name in "ab")
        table = v1.get_variable("table", [5, 3], initializer=v1.ones_initializer())

        def found(ids):
            by_rows = kind == "gathered"
            return tf.gather(table, ids) if by_rows else tf.one_hot(ids, 5) @ table

        loss, other = (tf.reduce_mean(found(ids) ** 2) for ids in (one, two))
        train, session = _sgd(loss), begin()
        value, _ = session.run([loss, train], {one: [1, 1, 3]})
        return [value, session.run(table), session.run(other, {two: [1, 3]})]

    helpers.in_sessions(run, strategy=plan)


METRICS: dict[str, Callable[[tf.Tensor], Any]] = {
    "mean of rows": lambda x: v1.metrics.mean(x),
    "mean of a mean": lambda x: v1.metrics.mean(tf.reduce_mean(x)),
    "mean of a sum": lambda x: v1.metrics.mean(tf.reduce_sum(x)),
    "mean_tensor": lambda x: v1.metrics.mean_tensor(tf.reduce_mean(x)[None]),
    "weighted": lambda x: v1.metrics.mean(x, weights=x / tf.reduce_sum(x)),
    "accuracy": lambda x: v1.metrics.accuracy(x > 2, x > tf.reduce_mean(x)),
    "rmse": lambda x: v1.metrics.root_mean_squared_error(x, tf.ones_like(x)),
    "auc": lambda x: v1.metrics.auc(x > 2, x / 10.0),
    "precision": lambda x: v1.metrics.precision(x > 2, x > 3),
}


@pytest.mark.battery(4)
@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_tensorflow_1_are_those_of_one_device(name):
    def run(begin):
        x = v1.placeholder(tf.float32, [None])
        value, update = METRICS[name](x)
        session = begin()
        for feed in (ROWS, [5.0, 7.0, 9.0, 3.0], [2.0]):
            session.run(update, {x: feed})
        return [session.run(value), session.run(v1.local_variables())]

    helpers.in_sessions(run)


def test_the_norm_of_sparse_gradients_sees_all_rows():
    def run(begin):
        ids = v1.placeholder(tf.int32, [None])
        table = v1.get_variable("table", [6, 3], initializer=v1.ones_initializer())
        slopes = tf.gradients(tf.reduce_mean(tf.gather(table, ids) ** 2), [table])
        (slope,), norm = tf.clip_by_global_norm(slopes, 0.05)
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        train, session = optimizer.apply_gradients([(slope, table)]), begin()
        value, _ = session.run([norm, train], {ids: [1, 1, 1, 2]})
        return [value, session.run(table)]

    helpers.in_sessions(run)


@pytest.mark.battery(3)
@pytest.mark.parametrize("uses, n_loops", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("builder", ["PartitionedPS", "UnevenPartitionedPS"])
def test_variables_in_parts_that_a_loop_uses(uses, n_loops, builder):
    def run(begin):
        x = v1.placeholder(tf.float32, [None, 5])
        d, e = (
            v1.get_variable(name, [5], initializer=v1.constant_initializer(value))
            for name, value in (("d", 0.5), ("e", 0.3))
        )

        def body(t, c):
            for _ in range(uses):
                c = tf.tanh(d * c) + e * c
            return t + 1, c

        found = [
            tf.while_loop(lambda t, c: t < 2, body, [0, x])[1] for _ in range(n_loops)
        ]
        loss = tf.reduce_mean(tf.add_n(found) ** 2)
        train, session = _sgd(loss), begin()
        feed = {x: np.arange(20, dtype=np.float32).reshape(4, 5) / 10}
        return [session.run([loss, train], feed)[0], session.run([d, e])]

    helpers.in_sessions(run, strategy=getattr(strategy, builder)())


Y = np.float32([0, 1, 0, 0, 2, 3, 1, 5])
LOSSES: dict[str, Callable[..., tf.Tensor]] = {
    "softmax weights": lambda e, y: tf.reduce_sum(
        tf.exp(y) / tf.reduce_sum(tf.exp(y)) * e**2
    ),
    "n positives": lambda e, y: (
        tf.reduce_sum(e**2) / tf.reduce_sum(tf.cast(y > 0, tf.float32))
    ),
    "centred": lambda e, y: tf.reduce_mean((e + tf.reduce_mean(y)) ** 2),
    "sum": lambda e, y: tf.reduce_sum(e**2),
    "mean": lambda e, y: tf.reduce_mean(e**2),
}


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("said", [None, "mean", "sum"])
@pytest.mark.filterwarnings("ignore:loss= of:DeprecationWarning")
def test_what_is_said_of_a_loss_changes_nothing(name, said):
    def run(begin):
        x, y = v1.placeholder(tf.float32, [None, 1]), v1.placeholder(tf.float32, [None])
        w = v1.get_variable("w", [1, 1], initializer=v1.ones_initializer())
        loss = LOSSES[name](tf.squeeze(x @ w, 1) - y, y)
        train, session = _sgd(loss, 0.001), begin(loss=said)
        feed = {x: np.float32([[1], [2], [3], [4], [5], [6], [7], [9]]), y: Y}
        return [session.run([loss, train], feed)[0], session.run(w)]

    helpers.in_sessions(run)


def test_gradients_that_are_rows_are_fetched():
    def run(begin):
        ids = v1.placeholder(tf.int32, [None])
        table = v1.get_variable("table", [6, 2], initializer=v1.ones_initializer())
        rows = tf.nn.embedding_lookup(table, ids)
        (slope,) = tf.gradients(tf.reduce_mean(rows**2), [table])
        return tuple(begin().run(slope, {ids: [1, 3, 1, 5]}))

    helpers.in_sessions(run)


PYTHONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "rows": lambda x: v1.py_func(lambda v: v * 2, [x], tf.float32),
    "the first": lambda x: tf.ensure_shape(
        v1.py_func(lambda v: v[:1], [x], tf.float32), [1]
    ),
    "all but one": lambda x: tf.ensure_shape(
        v1.py_func(lambda v: v[1:], [x], tf.float32), [None]
    ),
    "a place": lambda x: tf.ensure_shape(v1.py_func(np.argmax, [x], tf.int64), []),
    "a mean": lambda x: tf.numpy_function(np.mean, [x], tf.float32),
}


@pytest.mark.parametrize("name", PYTHONS)
def test_what_python_computes_is_computed_of_all_examples(name):
    def run(begin):
        x = v1.placeholder(tf.float32, [None])
        found, session = PYTHONS[name](x), begin()
        return [session.run([found, x], {x: ROWS[:n]}) for n in (4, 3, 1)]

    helpers.in_sessions(run)


def _mixed(x: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.reduce_sum(w * x) + w * w


def _sorted(x: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.sort(w * x) * x)


@pytest.mark.parametrize("make", [_mixed, _sorted])
def test_losses_of_elements_are_those_of_all_their_rows(make):
    def run(begin):
        data = tf.data.Dataset.from_tensor_slices(np.float32([3, 1, 2, 7, 5, 4]))
        iterator = v1.data.make_initializable_iterator(data.batch(3).repeat())
        x, w = iterator.get_next(), tf.Variable(1.0)
        loss = make(x, w)
        train, session = _sgd(loss, 0.01), begin()
        session.run(iterator.initializer)
        return [*(session.run([loss, train])[0] for _ in range(3)), session.run(w)]

    helpers.in_sessions(run)


def test_effects_happen_once():
    counts = []

    def run(begin):
        x = v1.placeholder(tf.float32, [None])
        seen = []
        noted = v1.py_func(lambda v: seen.append(v.tolist()), [x], [])
        session = begin()
        session.run(noted, {x: ROWS})
        session.run(noted, {x: ROWS[:1]})
        counts.append(seen)
        return 0

    helpers.in_sessions(run)
    assert counts == [[ROWS.tolist(), ROWS[:1].tolist()]] * 4


def test_what_is_staged_is_one_batch():
    def run(begin):
        x = v1.placeholder(tf.float32, [None])
        area = {"dtypes": [tf.float32], "container": "", "shared_name": "area"}
        put = tf.raw_ops.Stage(
            values=[x], container="", shared_name="area", capacity=0, memory_limit=0
        )
        size = tf.raw_ops.StageSize(**area)
        session = begin()
        session.run(put, {x: ROWS})
        return session.run(size)

    assert helpers.in_sessions(run) == 1
