# SPDX-License-Identifier: Apache-2.0
"""Which calls of a function share a trace; methods, threads and Keras' fit."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import replicator
from tests.autodist import helpers
from tests.autodist.programs import examples

X, Y = examples(12, 4), examples(24, 2)[:12]


@pytest.mark.parametrize(
    "make, wanted",
    [
        (lambda k: (X, tf.constant(float(k))), 1),
        (lambda k: (X, np.float32(k)), 1),
        (lambda k: (X[: 1 + k],), 1),
        (lambda k: (tf.sparse.from_dense(X[: 1 + k]),), 1),
        (lambda k: (X[:, : 1 + k],), 2),  # as it is first, and then of any length
        (lambda k: (X, k), 5),
    ],
    ids=["tensors", "NumPy scalars", "rows", "sparse", "lengths", "Python numbers"],
)
def test_calls_share_traces(make, wanted, monkeypatch):
    said, calls = [], []
    monkeypatch.setattr(logging, "warning", lambda text, *own: said.append(text % own))

    def dense(x):
        return tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x

    @helpers.make(2).function
    def total(x, factor=1.0):
        calls.append(factor)
        return tf.reduce_sum(dense(x)) * tf.cast(factor, tf.float32)

    for k in range(4 + (wanted != 2)):
        given = make(k)
        factor = float(given[1]) if len(given) > 1 else 1.0
        result, expected = total(*given), np.sum(dense(given[0])) * factor
        np.testing.assert_allclose(result, expected, rtol=1e-4)
    assert len(calls) == wanted
    text = "total was traced 5 times, for as many Python numbers: [4] now"
    assert len(said) == (wanted == 5) and all(text in one for one in said)


def test_what_cannot_be_traced_for_any_length_is_tried_once():
    calls = []

    @helpers.make(2).function
    def total(x):
        calls.append(x.shape[1])
        return tf.reduce_sum(x @ tf.ones([int(x.shape[1]), 2]), 1)

    for length in (4, 3, 2, 1, 3, 2):
        x = X[:, :length]
        np.testing.assert_allclose(total(x), 2 * x.sum(1), rtol=1e-4, atol=1e-5)
    assert calls == [4, None, 3, 2, 1]


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
    calls, autodist, builds = [], helpers.make(3), []
    counted = functools.partial(_total, calls)
    total = autodist.function(counted, input_signature=signature)
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
    calls = []

    class Scale:
        @helpers.make(2).function(input_signature=[{"x": tf.TensorSpec([None, None])}])
        def of(self, named, factor=1.0):
            calls.append(named["x"].shape)
            return named["x"] * factor

    scale, other = Scale(), Scale()
    for length in (4, 3, 2):
        x = X[:, :length]
        np.testing.assert_array_equal(scale.of({"x": x}, factor=2.0), x * 2)
        other.of({"x": x})
    assert len(calls) == 2
    specs = [tf.TensorSpec([None, 2])]
    first = helpers.make(2).function(lambda x, *_: x, input_signature=specs)
    np.testing.assert_array_equal(first(np.array([[1, 2]])), [[1, 2]])


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


def test_a_function_that_only_computes_is_warned_of_nothing(monkeypatch, caplog):
    monkeypatch.setattr(logging, "warning", pytest.fail)

    @helpers.make(2).function
    def scaled(x):
        iterator = iter(tf.data.Dataset.range(1, 4))
        for _ in tf.range(3):
            x *= tf.cast(next(iterator), tf.float32)
        return tf.reduce_mean(x)

    np.testing.assert_allclose(scaled(X), X.mean() * 6, rtol=1e-5)
    assert not caplog.text


# --- Methods and threads --------------------------------------------------------------


def test_methods_of_equal_objects_are_told_apart():
    autodist = helpers.make(2)

    @dataclasses.dataclass  # compares by its fields, and has no hash
    class Scale:
        name: str
        factor: Any = dataclasses.field(default=1.0, compare=False)

        @autodist.function
        def of(self, x):
            return x * self.factor

    scales = Scale("one", 2.0), Scale("one", 3.0)
    assert scales[0] == scales[1]
    for scale in scales:
        np.testing.assert_array_equal(scale.of(X), X * scale.factor)


def test_a_function_may_be_a_method():
    autodist = helpers.make(3)

    class Scale:
        def __init__(self, factor):
            self.factor = factor

        @autodist.function
        def of(self, x, plus=0.0):
            return x * self.factor + plus

    for factor in (2.0, 3.0):
        np.testing.assert_array_equal(Scale(factor).of(X), X * factor)
    scale = Scale(4.0)
    np.testing.assert_array_equal(scale.of(X, plus=1.0), X * 4 + 1)
    np.testing.assert_array_equal(Scale.of(scale, X), X * 4)
    kept = weakref.ref(scale)
    del scale
    Scale.of._traces.clear()  # called with the object as an argument
    Scale.of._found.clear()
    gc.collect()
    assert kept() is None


def test_threads_call_one_function_each_with_its_own():
    autodist = helpers.make(2)

    @autodist.function
    def double(x):
        return 2 * x

    def call(k):
        return [double(np.float32([k, n])).numpy().tolist() for n in range(20)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for k, result in enumerate(pool.map(call, range(8))):
            assert result == [[2 * k, 2 * n] for n in range(20)]


def _largest_error(y, y_pred):
    return tf.reduce_max(tf.abs(y - y_pred))


def test_fit_of_keras_in_the_scope_trains_as_on_one_device():
    results = []
    for autodist in (helpers.make(2), helpers.make(3), None):
        tf.keras.utils.set_random_seed(1)
        with autodist.scope() if autodist else tf.init_scope():
            model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
            model.compile("adam", "mse", metrics=[_largest_error])
        if autodist:
            autodist.keras_model(model)
        fit = {"batch_size": 5, "epochs": 2, "verbose": 0, "shuffle": False}
        history = model.fit(X, Y, **fit).history
        results.append((dict(sorted(history.items())), model.get_weights()))
    for found in results[:2]:
        helpers.assert_equal(found, results[2])


def test_keyword_arguments_are_split_as_others():
    minus = helpers.make(2).function(lambda a, b=1.0, *, c: a - b * c)
    np.testing.assert_allclose(minus(X[:3], c=Y[:3, :1]), X[:3] - Y[:3, :1])
    with pytest.raises(replicator.ArgumentError, match=r"\(3, 4\), \(2, 1\)"):
        minus(X[:3], c=Y[:2, :1])
