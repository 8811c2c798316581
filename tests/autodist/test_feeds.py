# SPDX-License-Identifier: Apache-2.0
"""What is fed is split into parts that are all of it, and else given to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.autodist import elements
from tests.autodist import helpers
from tests.autodist.test_session import scope

v1 = tf.compat.v1
X = np.arange(14.0).reshape(7, 2)
HERE = r"test_feeds\.py:\d+ in"


def _graph(**shapes: Any) -> tf.Graph:
    """Returns a graph of placeholders of some names, shapes and dtypes."""
    with tf.Graph().as_default() as graph:
        for name, (dtype, shape) in shapes.items():
            v1.placeholder(dtype, shape, name)
    return graph


def _examples() -> tf.Graph:
    return _graph(
        x=(tf.float32, [None, 2]),
        y=(tf.int32, None),
        rate=(tf.float64, []),
        fixed=(tf.float32, [4]),
    )


def test_values_are_arrays_of_the_placeholders_dtypes_in_the_order_of_names(behavior):
    graph = _examples()
    x = graph.get_tensor_by_name("x:0")
    read = elements.fed(graph, {"y:0": [1, 2], x: X.tolist(), "rate:0": 3})
    assert [tensor.name for tensor, _ in read] == ["rate:0", "x:0", "y:0"]
    assert [array.dtype for _, array in read] == [np.float64, np.float32, np.int32]
    np.testing.assert_array_equal(read[1][1], X)
    assert elements.fed(graph, None) == elements.fed(graph, {}) == []


@pytest.mark.parametrize(
    "lengths, few, expected",
    [
        ((4, 4), 2, (0, 0)),
        ((4, 5), 2, (0, 1)),
        ((1, 4), 2, (None, None)),
        ((0, 0), 2, (None, None)),
        ((1, 1), 1, (0, 0)),
        ((2, 2), 3, (None, None)),
    ],
)
def test_equally_long_batches_are_split_alike(lengths, few, expected):
    graph = _graph(a=(tf.float32, [None]), b=(tf.float32, [None, 1]))
    a, b = lengths
    fed = elements.fed(graph, {"a:0": np.ones(a), "b:0": np.ones([b, 1])})
    assert elements.pattern(fed, few) == expected


def test_only_a_first_size_that_is_unknown_is_split():
    graph = _examples()
    given = {"x:0": X[:4], "y:0": [1, 2, 3, 4], "rate:0": 0.5, "fixed:0": np.ones(4)}
    fed = elements.fed(graph, given)
    which = dict(zip(sorted(given), elements.pattern(fed, 2), strict=True))
    assert which == {"fixed:0": None, "rate:0": None, "x:0": 0, "y:0": None}


@pytest.mark.parametrize("rows", [7, 6, 3, 2, 1, 0])
def test_each_placeholders_value_is_the_whole_in_order(rows):
    def run(begin):
        x = v1.placeholder(tf.float32, [None, 2])
        y = v1.placeholder(tf.int32)  # of unknown rank
        rate, fixed = v1.placeholder(tf.float32, []), v1.placeholder(tf.float32, [4])
        total = tf.reduce_sum(x * rate, 0)
        session = begin()
        given = {x: X[:rows], y: range(rows), rate: 0.5, fixed: np.arange(4)}
        return session.run([x, y, rate, fixed, total], given)

    helpers.in_sessions(run, 1, 3, 4)


LENGTHS = [(4, 5), (5, 4), (3, 7), (1, 4), (4, 1), (2, 2), (6, 6)]


def test_batches_may_differ_in_length():
    def run(begin):
        x, y = v1.placeholder(tf.float32, [None, 2]), v1.placeholder(tf.float32, [None])
        w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
        loss = tf.reduce_mean((x @ w) ** 2) + tf.reduce_sum(w) * tf.reduce_mean(y)
        train = v1.train.GradientDescentOptimizer(1e-3).minimize(loss)
        session = begin()
        return [
            session.run([loss, x, y, train], {x: X[:a], y: np.arange(b)})[:3]
            for a, b in LENGTHS
        ] + [session.run(w)]

    helpers.in_sessions(run)


def test_sparse_tensors_are_fed():
    def run(begin):
        x = v1.sparse_placeholder(tf.float32, [None, 4])
        w = v1.get_variable("w", [4, 2], initializer=v1.ones_initializer())
        rows = tf.sparse.sparse_dense_matmul(x, w)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(rows**2))
        session, indices = begin(), [[0, 1], [1, 2], [2, 0], [2, 3]]
        value = v1.SparseTensorValue(indices, [1.0, 2.0, 3.0, 4.0], [3, 4])
        values = [session.run([rows, train], {x: value})[0] for _ in range(2)]
        return [*values, session.run(w), tuple(session.run(x, {x: tuple(value)}))]

    helpers.in_sessions(run)


@pytest.mark.parametrize("has_shape", [True, False])
def test_indexed_slices_are_fed(has_shape):
    def run(begin):
        shape = tf.constant([5, 2]) if has_shape else None
        rows, ids = v1.placeholder(tf.float32, [None, 2]), v1.placeholder(tf.int32)
        x = tf.IndexedSlices(rows, ids, shape)
        dense = tf.math.unsorted_segment_sum(x.values, x.indices, 5)
        parts = X[:3], [1, 1, 4], [5, 2]
        return begin().run(dense, {x: parts[: 2 + has_shape]})

    helpers.in_sessions(run)


def _handle() -> Any:
    with tf.init_scope():
        return tf.Variable(1.0).handle


REFUSED: dict[str, tuple[Callable[[tf.Graph], Any], str]] = {
    "no dict": (lambda g: [("x:0", X)], "feed_dict=.*Fix: pass a dict"),
    "no tensor": (
        lambda g: {"z:0": X},
        "fed 'z:0', which is not a tensor of its graph.*Fix",
    ),
    "an op": (lambda g: {"x": X}, "fed 'x', which is not a tensor"),
    "of another graph": (
        lambda g: {_examples().get_tensor_by_name("x:0"): X},
        "which is not a tensor of its graph",
    ),
    "part of a sparse tensor": (
        lambda g: {tf.SparseTensor([[0]], [1], [1]): X},
        f"for a SparseTensor.*fed at .*{HERE}.*Fix: feed its components",
    ),
    "another size": (
        lambda g: {"x:0": X[:, :1]},
        rf"x:0, float32\(None, 2\).*of shape \(7, 1\).*created at .*{HERE}.*Fix:",
    ),
    "another rank": (lambda g: {"x:0": [1.0]}, r"x:0, float32.*of shape \(1,\).*Fix"),
    "another dtype": (
        lambda g: {"x:0": [["a", "b"]]},
        f"x:0, float32.*could not convert.*fed at .*{HERE}",
    ),
    "a number that does not fit": (lambda g: {"y:0": 2**40}, "y:0, int32.*: "),
    "a handle": (lambda g: {"x:0": _handle()}, "x:0, float32.*fed at .*Fix: feed"),
    "a tensor of a graph": (
        lambda g: {"x:0": g.get_tensor_by_name("x:0")},
        "a symbolic tensor, which has no value",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    fed, said = REFUSED[name]
    graph = _examples()
    with pytest.raises(errors.ArgumentError, match=f"(?s){said}"):
        elements.fed(graph, fed(graph))


def test_a_session_goes_on_after_a_feed_that_is_refused():
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None], "x")
        session = autodist.create_distributed_session()
        for wrong in ({x: [[1.0]]}, {"q": 1}, 3, {x: ["a"]}):
            with pytest.raises(errors.ArgumentError, match=r"(?s)fed|feed_dict"):
                session.run(x, wrong)
            assert session.run(x, {x: [1.0, 2.0]}).tolist() == [1, 2]


def test_a_placeholder_that_is_not_fed_is_named_with_its_line():
    with scope(2) as autodist:
        x, y = (v1.placeholder(tf.float32, [None], name) for name in "xy")
        total = tf.reduce_sum(x) + tf.reduce_sum(y)
        session = autodist.create_distributed_session()
        for feed in (None, {x: [1.0, 2.0]}):
            with pytest.raises(
                errors.ArgumentError, match=rf"(?s)\b[xy]\b.*{HERE} .*Fix"
            ):
                session.run(total, feed)
        assert session.run(total, {x: [1.0, 2.0], y: [3.0]}) == 6


# Of defaults of placeholders: losses, and whether examples are fed beside them.
W = np.arange(1, 5, dtype=np.float32)


def _default(value: Any) -> tf.Tensor:
    return v1.placeholder_with_default(value, [None])


DEFAULTS: dict[str, tuple[Callable[..., tf.Tensor], bool]] = {
    "a row per example": (lambda x, w: tf.reduce_sum(x * w * _default(W)), True),
    "a sum of its own": (
        lambda x, w: tf.reduce_sum(x * w) + tf.reduce_sum(_default(W) * w),
        True,
    ),
    "one row, repeated": (
        lambda x, w: tf.reduce_mean((x * w - 1) ** 2 * _default([2.0])),
        True,
    ),
    "alone, a sum": (lambda x, w: tf.reduce_sum(_default(W) * w), False),
    "alone, a mean": (lambda x, w: tf.reduce_mean(_default(W) * w), False),
    "known first size": (
        lambda x, w: (
            tf.reduce_mean(x * w)
            + w * tf.reduce_sum(v1.placeholder_with_default(W[:3], [3]))
        ),
        True,
    ),
    "more rows": (
        lambda x, w: (
            tf.reduce_sum(x * w) + tf.reduce_sum(_default(np.ones(5, "f")) * w)
        ),
        True,
    ),
    "one row, not repeated": (
        lambda x, w: tf.reduce_sum(x * w) + tf.reduce_sum(_default([1.0]) * w),
        True,
    ),
    "one row, counted": (
        lambda x, w: (
            tf.reduce_sum(x * w * (one := _default([1.0]))) / tf.reduce_sum(one)
        ),
        True,
    ),
    "computed": (
        lambda x, w: tf.reduce_sum(x * w) + tf.reduce_sum(_default(W * w) * w),
        True,
    ),
    "of the examples": (lambda x, w: tf.reduce_mean(x * w * _default(x + w)), True),
}


@pytest.mark.battery(4)
@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_count_as_on_one_device(name):
    make, is_fed = DEFAULTS[name]

    def run(begin):
        w = v1.get_variable("w", initializer=1.0, use_resource=True)
        x = v1.placeholder(tf.float32, [None])
        loss = make(x, w)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session, feed = begin(), {x: W} if is_fed else {}
        return [session.run([loss, train], feed)[0], session.run(w)]

    helpers.in_sessions(run, 2, 3)


def test_what_is_fed_in_place_of_a_default_is_split():
    def run(begin):
        x, weights = v1.placeholder(tf.float32, [None]), _default(W)
        total, session = tf.reduce_sum(x * weights), begin()
        values = [session.run(total, {x: W})]
        for one, other in ((W[:2], [1.0, 1.0]), (W, W), (W[:3], [2.0])):
            values.append(session.run([total, weights], {x: one, weights: other}))
        return values

    helpers.in_sessions(run)


def test_a_default_beside_an_iterators_element_is_whole():
    def run(begin):
        dataset = tf.data.Dataset.from_tensor_slices(np.arange(8.0)).batch(4)
        iterator = v1.data.make_initializable_iterator(dataset)
        scale = v1.placeholder_with_default(np.arange(4.0), [None])
        scaled, session = iterator.get_next() * scale, begin()
        session.run(iterator.initializer)
        return [session.run(scaled) for _ in range(2)]

    helpers.in_sessions(run)
