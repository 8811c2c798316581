# SPDX-License-Identifier: Apache-2.0
"""Which calls of a function share a trace, and what it is given."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import replicator
from tests.autodist import helpers

X = np.random.default_rng(0).normal(size=[8, 4]).astype(np.float32)


@pytest.mark.parametrize(
    "make, wanted",
    [
        (lambda k: (X, tf.constant(float(k))), 1),
        (lambda k: (X, np.float32(k)), 1),
        (lambda k: (X[: 1 + k],), 1),
        (lambda k: (X[:, : 1 + k],), 2),  # as it is first, and then of any length
        (lambda k: (X, k), 5),
    ],
    ids=["tensors", "NumPy scalars", "numbers of rows", "lengths", "Python numbers"],
)
def test_calls_share_traces(make, wanted, monkeypatch):
    said, calls = [], []
    monkeypatch.setattr(logging, "warning", lambda text, *own: said.append(text % own))

    @helpers.make(2).function
    def total(x, factor=1.0):
        calls.append(factor)
        return tf.reduce_sum(x) * tf.cast(factor, tf.float32)

    for k in range(5):
        given = make(k)
        factor = float(given[1]) if len(given) > 1 else 1.0
        result = total(*given)
        np.testing.assert_allclose(result, given[0].sum() * factor, rtol=1e-4)
    assert len(calls) == wanted
    text = "total was traced 5 times, for as many Python numbers: [4] now"
    assert len(said) == (wanted == 5) and all(text in one for one in said)


def test_where_a_length_must_be_known_there_is_a_trace_for_each():
    calls = []

    @helpers.make(2).function
    def total(x):
        calls.append(x.shape)
        return tf.reduce_sum(x @ tf.ones([int(x.shape[1]), 2]), 1)

    for length in (4, 3, 2, 3):
        x = X[:, :length]
        np.testing.assert_allclose(total(x), 2 * x.sum(1), rtol=1e-4, atol=1e-5)
    known = [shape for shape in calls if shape[1] is not None]
    assert [shape[1] for shape in known] == [4, 3, 2]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_sparse_and_ragged_tensors_are_arguments_and_results(num_replicas):
    calls = []

    @helpers.make(num_replicas).function
    def step(x, ragged, y):
        calls.append(1)
        rows = tf.sparse.sparse_dense_matmul(x, tf.ones([4, 1])) - y[:, :1]
        return rows, ragged.with_values(ragged.values * 2), tf.sparse.from_dense(y)

    for n in (8, 5, 2):
        y = X[:n] * (X[:n] > 0)
        rows, ragged, sparse = step(
            *(tf.sparse.from_dense(y), tf.ragged.constant([[1.0, 2], [3]]), X[:n])
        )
        np.testing.assert_allclose(
            rows[:, 0], y.sum(1) - X[:n, 0], rtol=1e-4, atol=1e-5
        )
        assert ragged.to_list() == [[2, 4], [6]]
        np.testing.assert_array_equal(tf.sparse.to_dense(sparse), X[:n])
    assert len(calls) == 1


def test_what_is_no_array_is_a_constant_of_the_trace():
    autodist = helpers.make(2)
    with autodist.scope():
        v = tf.Variable(2.0)

    @autodist.function
    def named(x, options, v):
        return {options["name"]: x * v, "n": 3, "none": None}

    result = named(X, {"name": "twice"}, v)
    np.testing.assert_array_equal(result["twice"], X * 2)
    assert int(result["n"]) == 3 and result["none"] is None
    v.assign(3.0)
    np.testing.assert_array_equal(named(X, {"name": "x"}, v)["x"], X * 3)
    with pytest.raises(replicator.ArgumentError, match=r"(?s)named.*hashable.*Fix"):
        named(X, {"name": {1}}, v)
