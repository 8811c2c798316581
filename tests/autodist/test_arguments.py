# SPDX-License-Identifier: Apache-2.0
"""Which calls of a function share a trace, and what it is given."""

from __future__ import annotations

import functools

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


@pytest.mark.parametrize(
    "take", [lambda x: tf.reduce_sum(x) / x.shape[0], lambda x: tf.unstack(x)[0]]
)
def test_an_error_where_the_number_of_rows_is_asked_for_says_how_to(take):
    with pytest.raises((TypeError, ValueError)) as raised:
        helpers.make(2).function(take)(X)
    assert any("Fix: use tf.shape(x)[0]" in one for one in raised.value.__notes__)
    with pytest.raises(TypeError) as raised:
        helpers.make(2).function(lambda x: x + object())(X)
    assert not [one for one in raised.value.__notes__ if "Fix" in one]


def _total(calls, x, factor=1.0):
    calls.append(x.shape)
    return tf.reduce_sum(x) * tf.cast(factor, tf.float32)


SIGNATURE = [tf.TensorSpec([None, None]), tf.TensorSpec([], tf.float64)]


@pytest.mark.parametrize("signature, wanted", [(None, 2), (SIGNATURE, 1)])
def test_traces_and_builds_do_not_grow_with_lengths(signature, wanted):
    calls, autodist = [], helpers.make(3)
    total = autodist.function(
        functools.partial(_total, calls), input_signature=signature
    )
    builds = []
    for k in range(20):
        rows, length = 1 + 7 * k % 20, 1 + 3 * k % 20
        x = np.full([rows, length], 0.5, np.float32)
        factor = 0.25 * k if signature else np.float64(0.25 * k)
        assert float(total(x, factor)) == 0.125 * rows * length * k
        builds.append(autodist.replicator.plan)
    assert len(calls) == wanted
    # Of few rows, which are not split, and of others.
    assert len({id(plan) for plan in builds}) <= 2 * wanted


def test_a_signature_is_of_positional_arguments():
    calls, specs = [], [tf.TensorSpec([None, 2])]

    class Scale:
        @helpers.make(2).function(input_signature=[{"x": tf.TensorSpec([None, None])}])
        def of(self, named, factor=1.0):
            calls.append(named["x"].shape)
            return named["x"] * factor

    for length in (4, 3, 2):
        x = X[:, :length]
        np.testing.assert_array_equal(Scale().of({"x": x}, factor=2.0), x * 2)
    assert len(calls) == 3  # of three objects
    scale = Scale()
    for length in (4, 3, 2):
        scale.of({"x": X[:, :length]})
    assert len(calls) == 4
    first = helpers.make(2).function(lambda x, *_: x, input_signature=specs)
    np.testing.assert_array_equal(first(np.array([[1, 2]])), [[1, 2]])
    for bad in [(X,), (X, X), (), (tf.ones([3, 2], tf.int32),)]:
        with pytest.raises(
            replicator.ArgumentError, match=r"(?s)<lambda> (was given|cannot).*Fix"
        ):
            first(*bad)
    with pytest.raises(replicator.ArgumentError, match=r"(?s)input_signature=3.*Fix"):
        helpers.make(2).function(_total, input_signature=3)


def test_what_cannot_be_traced_for_any_length_is_tried_once():
    calls = []

    @helpers.make(2).function
    def total(x):
        calls.append(x.shape[1])
        return tf.reduce_sum(x @ tf.ones([int(x.shape[1]), 2]), 1)

    for length in (4, 3, 2, 1, 3, 2):
        total(X[:, :length])
    assert calls == [4, None, 3, 2, 1]


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
