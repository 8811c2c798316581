# SPDX-License-Identifier: Apache-2.0
"""Programs of sessions: what is fetched, and what is fed."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import tensorflow as tf

from tests.autodist.sessions import EACH, program

v1 = tf.compat.v1
X = np.arange(14, dtype=np.float32).reshape(7, 2)
ROWS = np.float32([1, 2, 3, 6])
Pair = collections.namedtuple("Pair", "one two")


def _sgd(loss: tf.Tensor, rate: float = 0.1) -> tf.Operation:
    return v1.train.GradientDescentOptimizer(rate).minimize(loss)


# --- Fetches --------------------------------------------------------------------------


@program()
def nests_and_names(begin: Any) -> Any:
    x = v1.placeholder(tf.float32, [None, 2], "x")
    tf.identity(x * 2, "double")
    mean = tf.reduce_mean(x, name="mean")
    named = collections.OrderedDict(p=Pair("double:0", [x]), q="double", r=tf.no_op())
    fetches = [named, mean, "mean:0", (x, mean), "x:0"]
    session = begin()
    return [session.run(fetches, {"x:0": X}), session.run([{}, ()])]


@program()
def dicts_whose_keys_have_no_order(begin: Any) -> Any:
    x, first = v1.placeholder(tf.float32, [None, 2]), object()
    nest = [{first: tf.reduce_sum(x), "b": {2: x}}, Pair({1: x}, ())]
    named, pair = begin().run(nest, {x: X})
    assert list(named) == [first, "b"] and type(pair) is Pair
    return [named[first], named["b"][2], pair.one[1], list(pair.two)]


@program()
def names_that_begin_others(begin: Any) -> Any:
    x = v1.placeholder(tf.float32, [None, 2])
    weight = v1.get_variable("weight", initializer=1.0)
    loss = tf.reduce_mean(weight * x, name="loss")
    twice = tf.multiply(loss, 2.0, name="loss_1")
    total = tf.Variable(5.0, name="loss/total", trainable=False)
    return begin().run([loss, twice, total], {x: X})


def _sparse(x: tf.Tensor) -> Any:
    return tf.sparse.from_dense(x[:, None] * [0.0, 1.0])


def _slices(x: tf.Tensor) -> Any:
    ids = tf.cast(x, tf.int32)
    table = tf.Variable(tf.ones([9, 2]))
    return tf.gradients(tf.reduce_mean(tf.gather(table, ids) ** 2), [table])[0]


def _ragged(x: tf.Tensor) -> Any:
    lengths = tf.cast(x, tf.int32)
    return tf.RaggedTensor.from_row_lengths(tf.range(tf.reduce_sum(lengths)), lengths)


def _ragged_in_two_ways(x: tf.Tensor) -> Any:
    inner = _ragged(x)
    return tf.RaggedTensor.from_row_lengths(inner, [inner.nrows() - 1, 1])


@program(
    {
        "sparse": _sparse,
        "slices": _slices,
        "slices without a shape": lambda x: tf.IndexedSlices(x, tf.cast(x, tf.int64)),
        "ragged": _ragged,
        "ragged in two ways": _ragged_in_two_ways,
    }
)
def values_of_several_tensors(begin: Any, case: Any) -> Any:
    x = v1.placeholder(tf.float32, [None])
    fetch = case(x)
    value = begin().run({"value": [fetch]}, {x: [1, 3, 0, 1, 2]})["value"][0]
    is_ragged = hasattr(value, "to_list")
    return [type(value).__name__, value.to_list() if is_ragged else list(value)]


@program({"resource": True, "reference": False}, EACH)
def variables_by_name(begin: Any, case: bool) -> Any:
    x = v1.placeholder(tf.float32, [None, 2], "x")
    start = np.array([[2.0], [3.0]], np.float32)
    w = v1.get_variable("w", initializer=start, use_resource=case)
    _sgd(tf.reduce_mean(x @ w))
    return begin().run([w, w.op, "w", *([] if case else ["w:0", w.name])])


@program(strategies=EACH)
def variables_by_name_without_resource_variables(begin: Any) -> Any:
    enabled = v1.resource_variables_enabled()
    v1.disable_resource_variables()
    try:
        v1.get_variable("w", initializer=np.float32([2.0, 3.0]))
    finally:
        if enabled:
            v1.enable_resource_variables()
    return begin().run("w:0")


@program()
def a_summary(begin: Any) -> Any:
    x, summary = v1.placeholder(tf.float32, [None]), v1.Summary()
    v1.summary.scalar("mean", tf.reduce_mean(x))
    summary.ParseFromString(begin().run(v1.summary.merge_all(), {x: [1, 2, 6]}))
    return summary.value[0].simple_value


@program()
def a_session_that_is_the_default(begin: Any) -> Any:
    x = v1.placeholder(tf.float32, [None])
    mean = tf.reduce_mean(x)
    with begin() as session:
        assert session.graph is v1.get_default_graph() and session.list_devices()
        return [mean.eval({x: [1, 2, 6]}), session.make_callable(mean, [x])([1, 5])]


@program()
def a_session_with_hooks(begin: Any) -> Any:
    x = v1.placeholder(tf.float32, [None, 2])
    weight = v1.get_variable("weight", initializer=1.0)
    step, loss = v1.train.create_global_step(), tf.reduce_mean((x * weight) ** 2)
    train = v1.train.GradientDescentOptimizer(0.001).minimize(loss, step)

    class Creator(v1.train.SessionCreator):
        def create_session(self) -> Any:
            return begin()

    hooks = [v1.train.StopAtStepHook(num_steps=3), v1.train.NanTensorHook(loss)]
    losses = []
    with v1.train.MonitoredSession(Creator(), hooks) as session:
        while not session.should_stop():
            losses.append(session.run([train, loss], {x: X})[1])
    return losses


# --- Feeds ----------------------------------------------------------------------------


@program()
def feeds_of_all_shapes(begin: Any) -> Any:
    x, y = v1.placeholder(tf.float32, [None, 2]), v1.placeholder(tf.int32)
    rate, fixed = v1.placeholder(tf.float32, []), v1.placeholder(tf.float32, [4])
    fetches, session = [x, y, rate, fixed, tf.reduce_sum(x * rate, 0)], begin()
    return [
        session.run(fetches, {x: X[:n], y: range(n), rate: 0.5, fixed: np.arange(4)})
        for n in (7, 6, 3, 2, 1, 0)
    ]


@program()
def batches_of_two_lengths(begin: Any) -> Any:
    x, y = v1.placeholder(tf.float32, [None, 2]), v1.placeholder(tf.float32, [None])
    w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
    loss = tf.reduce_mean((x @ w) ** 2) + tf.reduce_sum(w) * tf.reduce_mean(y)
    train, session = _sgd(loss, 1e-3), begin()
    lengths = (4, 5), (5, 4), (3, 7), (1, 4), (4, 1), (2, 2), (6, 6)
    return [
        session.run([loss, x, y, train], {x: X[:a], y: np.arange(b)})[:3]
        for a, b in lengths
    ] + [session.run(w)]


@program()
def sparse_tensors_fed(begin: Any) -> Any:
    x = v1.sparse_placeholder(tf.float32, [None, 4])
    w = v1.get_variable("w", [4, 2], initializer=v1.ones_initializer())
    rows = tf.sparse.sparse_dense_matmul(x, w)
    train, session = _sgd(tf.reduce_mean(rows**2)), begin()
    indices = [[0, 1], [1, 2], [2, 0], [2, 3]]
    value = v1.SparseTensorValue(indices, [1.0, 2.0, 3.0, 4.0], [3, 4])
    values = [session.run([rows, train], {x: value})[0] for _ in range(2)]
    return [*values, session.run(w), tuple(session.run(x, {x: tuple(value)}))]


@program({"with a shape": [5, 2], "without": None})
def indexed_slices_fed(begin: Any, case: Any) -> Any:
    rows, ids = v1.placeholder(tf.float32, [None, 2]), v1.placeholder(tf.int32)
    x = tf.IndexedSlices(rows, ids, case and tf.constant(case))
    dense = tf.math.unsorted_segment_sum(x.values, x.indices, 5)
    return begin().run(dense, {x: (X[:3], [1, 1, 4], *([case] if case else []))})


@program()
def what_is_fed_may_be_computed_otherwise(begin: Any) -> Any:
    x = v1.placeholder(tf.float32, [None])
    y = x * 2
    total, session, given = tf.reduce_sum(y), begin(), {y: [1.0, 2.0, 6.0]}
    values = [session.run(total, {x: [1.0, 2.0]}), session.run(total, given)]
    return [*values, *session.run([total, y], given), session.run(y, {y: [3.0]})]


W = np.arange(1, 5, dtype=np.float32)


def _default(value: Any) -> tf.Tensor:
    return v1.placeholder_with_default(value, [None])


@program(
    {
        "a row per example": lambda x, w: tf.reduce_sum(x * w * _default(W)),
        "a sum of its own": lambda x, w: (
            tf.reduce_sum(x * w) + tf.reduce_sum(_default(W) * w)
        ),
        "one row, repeated": lambda x, w: tf.reduce_mean(
            (x * w - 1) ** 2 * _default([2.0])
        ),
        "alone, a sum": lambda x, w: tf.reduce_sum(_default(W) * w),
        "alone, a mean": lambda x, w: tf.reduce_mean(_default(W) * w),
        "known first size": lambda x, w: (
            tf.reduce_mean(x * w)
            + w * tf.reduce_sum(v1.placeholder_with_default(W[:3], [3]))
        ),
        "more rows": lambda x, w: (
            tf.reduce_sum(x * w) + tf.reduce_sum(_default(np.ones(5, "f")) * w)
        ),
        "one row, not repeated": lambda x, w: (
            tf.reduce_sum(x * w) + tf.reduce_sum(_default([1.0]) * w)
        ),
        "one row, counted": lambda x, w: (
            tf.reduce_sum(x * w * (one := _default([1.0]))) / tf.reduce_sum(one)
        ),
        "computed": lambda x, w: (
            tf.reduce_sum(x * w) + tf.reduce_sum(_default(W * w) * w)
        ),
        "of the examples": lambda x, w: tf.reduce_mean(x * w * _default(x + w)),
    }
)
def defaults(begin: Any, case: Any) -> Any:
    w = v1.get_variable("w", initializer=1.0, use_resource=True)
    x = v1.placeholder(tf.float32, [None])
    loss = case(x, w)
    train, session, feed = _sgd(loss), begin(), {x: W} if x.consumers() else {}
    return [session.run([loss, train], feed)[0], session.run(w)]


@program()
def defaults_that_are_fed(begin: Any) -> Any:
    x, weights = v1.placeholder(tf.float32, [None]), _default(W)
    total, session = tf.reduce_sum(x * weights), begin()
    values = [session.run(total, {x: W})]
    for one, other in ((W[:2], [1.0, 1.0]), (W, W), (W[:3], [2.0])):
        values.append(session.run([total, weights], {x: one, weights: other}))
    return values


# --- What is computed of feeds --------------------------------------------------------


@program(
    {
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
)
def metrics_of_tensorflow_1(begin: Any, case: Any) -> Any:
    x = v1.placeholder(tf.float32, [None])
    value, update = case(x)
    session = begin()
    for feed in (ROWS, [5.0, 7.0, 9.0, 3.0], [2.0]):
        session.run(update, {x: feed})
    return [session.run(value), session.run(v1.local_variables())]


def _numpy(function: Any, x: tf.Tensor, dtype: Any, shape: Any) -> tf.Tensor:
    return tf.ensure_shape(v1.py_func(function, [x], dtype), shape)


@program(
    {
        "rows": lambda x: v1.py_func(lambda v: v * 2, [x], tf.float32),
        "the first": lambda x: _numpy(lambda v: v[:1], x, tf.float32, [1]),
        "all but one": lambda x: _numpy(lambda v: v[1:], x, tf.float32, [None]),
        "a place": lambda x: _numpy(np.argmax, x, tf.int64, []),
        "a mean": lambda x: tf.numpy_function(np.mean, [x], tf.float32),
    }
)
def computed_by_python(begin: Any, case: Any) -> Any:
    x = v1.placeholder(tf.float32, [None])
    found, session = case(x), begin()
    return [session.run([found, x], {x: ROWS[:n]}) for n in (4, 3, 1)]


@program()
def effects(begin: Any) -> Any:
    seen: list[Any] = []
    x = v1.placeholder(tf.float32, [None])
    noted = v1.py_func(lambda v: seen.append(v.tolist()), [x], [])
    session = begin()
    session.run(noted, {x: ROWS})
    session.run(noted, {x: ROWS[:1]})
    return seen


@program({"mean": "mean", "sum": "sum"})
def a_loss_that_is_said_to_be(begin: Any, case: str) -> Any:
    """Which is deprecated, and changes nothing."""
    x = v1.placeholder(tf.float32, [None, 2])
    w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
    loss = tf.reduce_sum(x @ w) / (1.0 + tf.reduce_sum(x**2))
    train, session = _sgd(loss), begin(loss=case)
    return [session.run([loss, train], {x: X})[0], session.run(w)]
