# SPDX-License-Identifier: Apache-2.0
"""Functions of TensorFlow 2 compute the same on replicas as on one device."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
from absl import logging

import replicator
from tests.autodist import helpers
from tests.autodist.programs import SIZES, examples

X, Y = examples(12, 3), examples(24, 2)[:12]
IDS = np.random.default_rng(0).permutation(12)


def _by_hand(rate, variables):
    def apply(grads):
        for variable, gradient in zip(variables, grads, strict=True):
            variable.assign_sub(rate * tf.convert_to_tensor(gradient))

    return apply


def _v1(variables):
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.1)
    return lambda grads: optimizer.apply_gradients(zip(grads, variables, strict=True))


def _keras(variables):
    optimizer = tf.keras.optimizers.Adam(0.1, clipnorm=0.5)
    return lambda grads: optimizer.apply_gradients(zip(grads, variables, strict=True))


def _sonnet(variables):
    optimizer = snt.optimizers.Momentum(0.1, 0.9)

    def apply(grads):
        optimizer.apply([tf.convert_to_tensor(g) for g in grads], variables)

    return apply


OPTIMIZERS = {
    "by hand": functools.partial(_by_hand, 0.1),
    "v1": _v1,
    "keras": _keras,
    "sonnet": _sonnet,
}


def _train(family, autodist=None):
    """Returns the results of all steps, and the variables."""
    scope = autodist.scope() if autodist else tf.init_scope()
    with scope:
        w, b = tf.Variable(examples(3, 2)), tf.Variable([0.5, -0.5])
        table = tf.Variable(examples(12, 2))
        variables = [w, b, table]
        apply = OPTIMIZERS[family](variables)

    @tf.function
    def inner(x):
        return tf.tanh(tf.matmul(x, w) + b)

    def step(x, y, ids, scale, turns=2):
        with tf.GradientTape() as tape:
            output = inner(x) + tf.gather(table, ids)
            for _ in range(turns):
                output = output * b if scale > 1 else output + b
            k = tf.constant(0)
            while k < 2:
                output += 0.1 * tf.matmul(x, w)
                k += 1
            loss = tf.reduce_mean((output - y) ** 2) * scale
        apply(tape.gradient(loss, variables))
        return {"loss": loss, "made": (output, None), "rows": tf.reduce_sum(output, 1)}

    run = autodist.function(step) if autodist else tf.function(step)
    values = []
    for n in SIZES:
        scale = np.float32(0.5 + n % 2)
        values.append(run(X[:n], tf.constant(Y[:n]), ids=IDS[:n], scale=scale))
    return tf.nest.map_structure(np.asarray, (values, [v.numpy() for v in variables]))


@functools.cache
def _expected(family):
    return _train(family)


@pytest.mark.battery(6)
@pytest.mark.parametrize("family", OPTIMIZERS)
@pytest.mark.parametrize("num_replicas, strategy", [(2, "sharded"), (3, "mirrored")])
def test_a_function_trains_as_on_one_device(family, num_replicas, strategy):
    actual = _train(family, helpers.make(num_replicas, strategy))
    for a, b in zip(
        tf.nest.flatten(actual), tf.nest.flatten(_expected(family)), strict=True
    ):
        if b.dtype == object:  # None
            assert a == b
            continue
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_keras_fit_in_the_scope_trains_as_on_one_device():
    results = []
    for autodist in (helpers.make(2), None):
        tf.keras.utils.set_random_seed(1)
        scope = autodist.scope() if autodist else tf.init_scope()
        with scope:
            model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
            model.compile("adam", "mse")
        if autodist:
            autodist.keras_model(model)
        history = model.fit(X, Y, batch_size=5, epochs=2, verbose=0, shuffle=False)
        results.append((history.history["loss"], model.get_weights()))
    for a, b in zip(*map(tf.nest.flatten, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_keras_metrics_may_be_the_users():
    def largest_error(y, y_pred):
        return tf.reduce_max(tf.abs(y - y_pred))

    histories = []
    for autodist in (helpers.make(3), None):
        tf.keras.utils.set_random_seed(1)
        scope = autodist.scope() if autodist else tf.init_scope()
        with scope:
            model = tf.keras.Sequential([tf.keras.layers.Dense(2)])
            model.compile("sgd", "mse", metrics=[largest_error])
        if autodist:
            autodist.keras_model(model)
        history = model.fit(X, Y, batch_size=5, verbose=0, shuffle=False).history
        histories.append(history["largest_error"])
    np.testing.assert_allclose(*histories, rtol=1e-5)


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


def test_methods_of_objects_without_weak_references_are_refused():
    autodist = helpers.make(2)

    class Scale:
        __slots__ = ()

        @autodist.function
        def of(self, x):
            return x

    with pytest.raises(
        replicator.ArgumentError, match=r"(?s)of is a method of a Scale.*__weakref__"
    ):
        Scale().of(X)


@pytest.mark.parametrize("summarized", [False, True])
@pytest.mark.parametrize("name", ["sum", "scaled", "max", "count", "loop", "nested"])
def test_values_are_written_as_a_whole_inside_of_control_flow(
    name, summarized, tmp_path
):
    writer = tf.summary.create_file_writer(str(tmp_path))
    results = []
    for autodist in (helpers.make(3), None):
        with autodist.scope() if autodist else tf.init_scope():
            v = tf.Variable(0, dtype=tf.int64) if name == "count" else tf.Variable(0.0)

        def write(total, largest, count, v=v):
            if summarized:
                tf.summary.scalar("total", total, step=0)
            if name == "max":
                v.assign(largest)
            elif name == "count":
                v.assign_add(count)
            else:
                v.assign_add(total * 2.0 if name == "scaled" else total)

        def function(x, step, write=write):
            values = tf.reduce_sum(x), tf.reduce_max(x), tf.size(x, tf.int64)
            with writer.as_default():
                if name == "loop":
                    for _ in tf.range(2):
                        write(*values)
                elif step % 2 == 0:
                    if name != "nested" or step < 3:
                        write(*values)
            return values[0]

        run = autodist.function(function) if autodist else tf.function(function)
        run(np.float32([1, 2, 3, 4, 5, 7, 9]), tf.constant(2))
        results.append(v.numpy())
    np.testing.assert_allclose(*results, rtol=1e-6)


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


def test_an_argument_is_assigned_as_a_whole():
    autodist = helpers.make(2)
    with autodist.scope():
        last = tf.Variable(tf.zeros([1, 2]), shape=[None, 2], trainable=False)

    @autodist.function
    def remember(x):
        last.assign(x)

    for n in (6, 5):
        rows = np.arange(2.0 * n, dtype=np.float32).reshape(n, 2)
        remember(rows)
        np.testing.assert_array_equal(last, rows)


def test_one_trace_serves_batches_of_all_sizes():
    autodist, traced = helpers.make(3), []

    @autodist.function
    def double(x, name="a"):
        traced.append(name)
        return x * 2

    for n in (5, 4, 3, 1, 2):
        np.testing.assert_array_equal(double(X[:n]), X[:n] * 2)
    assert traced == ["a"]
    np.testing.assert_array_equal(double(X, "b"), X * 2)
    assert traced == ["a", "b"]


def test_a_function_does_on_a_tape_what_it_does_without():
    autodist = helpers.make(2)
    with autodist.scope():
        w = tf.Variable(10.0)

    @autodist.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(w * x)
        w.assign_sub(tape.gradient(loss, w))
        return {"loss": loss, "rows": w * x}

    expected = 10.0
    for around in [contextlib.nullcontext(), tf.GradientTape()] * 2:
        with around:
            result = step(np.float32([1, 3]))
        assert float(result["loss"]) == 2 * expected
        expected -= 2
        assert result["rows"].numpy().tolist() == [expected, 3 * expected]
        assert float(w) == expected


@pytest.mark.parametrize("where", ["branch", "function", "loop"])
def test_what_is_read_before_a_write_is_what_was_there_before(where):
    autodist = helpers.make(2)
    with autodist.scope():
        v = tf.Variable(tf.zeros([128, 128]))

    def spend():
        spent = tf.matmul(v, tf.eye(128)) + v + v.read_value()
        v.assign(spent + 1.0)
        return tf.reduce_mean(spent + tf.matmul(v, tf.eye(128)))

    @autodist.function
    def step(x):
        if where == "branch":
            return tf.cond(tf.reduce_sum(v) >= 0.0, spend, lambda: 0.0)
        if where == "function":
            return tf.function(spend)()
        return tf.while_loop(
            lambda k, _: k < 1, lambda k, _: (k + 1, spend()), (0, 0.0)
        )[1]

    assert [float(step(X)) for _ in range(3)] == [1.0, 7.0, 25.0]
    np.testing.assert_array_equal(v, np.full([128, 128], 13.0))


def test_an_optimizer_that_accumulates_gradients_does_so_as_on_one_device():
    def train(scope, function):
        with scope:
            w = tf.Variable(np.ones([3, 1], np.float32))
            optimizer = tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            optimizer.build([w])

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])

        run = function(step)
        for n in (5, 4, 5, 3, 2, 5):
            run(X[:n, :3])
        return w.numpy()

    autodist = helpers.make(2)
    found = train(autodist.scope(), autodist.function)
    wanted = train(contextlib.nullcontext(), tf.function)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize("how", ["rows", "loss", "not split"])
def test_metrics_of_keras_are_those_of_one_device_in_a_function_and_outside(how):
    sizes = (5, 1, 4) if how == "rows" else (5, 4)

    def measure(scope, function):
        with scope:
            mean, total = tf.keras.metrics.Mean(), tf.keras.metrics.Sum()

        def step(x):
            if how == "not split":
                x = tf.map_fn(lambda one: 2.0 * one, x)
            mean.update_state(tf.reduce_mean(x) if how == "loss" else x)
            total.update_state(x)
            return mean.result(), total.result()

        run = function(step)
        returned = [[float(y) for y in run(tf.constant(X[:n, 0]))] for n in sizes]
        mean.reset_state()
        again = run(tf.constant(X[:3, 0]))
        return returned, [float(y) for y in again], float(total.result())

    autodist = helpers.make(2)
    found = measure(autodist.scope(), autodist.function)
    wanted = measure(contextlib.nullcontext(), lambda step: step)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def _zeros_per_replica(autodist, size, aggregation="SUM"):
    """Returns an ON_READ variable."""
    with autodist.scope():
        return tf.Variable(
            tf.zeros([size]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=getattr(tf.VariableAggregation, aggregation),
        )


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("part", ["rows", "slice"])
def test_parts_of_variables_with_a_value_per_replica_are_written(part, aggregation):
    autodist = helpers.make(2)
    v = _zeros_per_replica(autodist, 3, aggregation)

    @autodist.function
    def step(x):
        if part == "rows":
            v.scatter_add(tf.IndexedSlices(x, tf.zeros_like(x, tf.int32)))
        else:
            v[0].assign(v[0] + tf.reduce_sum(x))
        return v.read_value()

    for size, total in ((3, 3.0), (1, 4.0)):  # the second has no example for each
        np.testing.assert_allclose(step(tf.ones([size])), [total, 0.0, 0.0])
    np.testing.assert_allclose(v.numpy(), [4.0, 0.0, 0.0])


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


def test_what_is_the_same_on_all_replicas_is_returned_once():
    autodist = helpers.make(2)
    with autodist.scope():
        w = tf.Variable([1.0, 2.0])
        n = tf.Variable(0)

    @autodist.function
    def step(x):
        n.assign_add(1)
        return w + 0.0, n + 0, tf.reduce_mean(x)

    actual = step(X[:3])
    np.testing.assert_array_equal(actual[0], [1, 2])
    assert int(actual[1]) == 1
    np.testing.assert_allclose(actual[2], X[:3].mean(), rtol=1e-6)


def _first(values):
    return values[0]


def test_errors_of_functions_say_what_is_wrong():
    autodist = helpers.make(2)
    with pytest.raises(replicator.ArgumentError, match=r"(?s)was given 3.*Fix"):
        autodist.function(3)
    same = autodist.function(lambda *args: args[0])
    with pytest.raises(replicator.ArgumentError, match=r"(?s)\(12, 3\), \(5,\).*Fix"):
        same(X, np.zeros(5))
    with pytest.raises(replicator.ArgumentError, match=r"(?s)are \[\(0,\)\].*Fix"):
        same(np.zeros(0))
    with pytest.raises(
        replicator.ArgumentError, match=r"(?s)with \{1\}: .*hashable.*Fix"
    ):
        same(X, {1})
    top = autodist.function(
        lambda x: tf.ensure_shape(tf.numpy_function(_first, [x], tf.int64), [])
    )
    assert top(np.array([1, 5, 2])) == 1  # a Python computation on the whole batch


def test_a_function_that_only_computes_is_warned_of_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging, "warning", pytest.fail)
    autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
    double = autodist.function(lambda x: 2.0 * x)
    np.testing.assert_array_equal(double(np.ones(4, "f")), 2.0 * np.ones(4))


def test_where_arrays_are_among_the_arguments_is_part_of_a_call():
    minus = helpers.make(2).function(lambda a, b: a - b)
    np.testing.assert_allclose(minus(X[:3], 2.0), X[:3] - 2)
    np.testing.assert_allclose(minus(2.0, X[:3]), 2 - X[:3])


def test_rows_whose_number_is_unknown_are_compared_when_they_are_there():
    plus = helpers.make(2).function(lambda a, b: a + b)
    some, three = tf.TensorSpec([None]), tf.TensorSpec([3])

    @tf.function(input_signature=[some, three])
    def outer(a, b):
        return plus(a, b)

    assert outer(np.ones(3, "f"), np.ones(3, "f")).numpy().tolist() == [2, 2, 2]
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"(?s)are \[\(None,\), \(3,\)\].*Fix",
    ):
        outer(np.ones(4, "f"), np.ones(3, "f"))
    unknown = tf.function(plus, input_signature=[tf.TensorSpec(None), three])
    with pytest.raises(replicator.ArgumentError, match=r"(?s)are \[None, .*Fix"):
        unknown(np.ones(3, "f"), np.ones(3, "f"))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("what", ["of examples", "of a constant"])
def test_parts_of_metrics_are_written_once_for_all_examples(what, rows):
    autodist = helpers.make(3)
    counts = _zeros_per_replica(autodist, 4)

    def count(places):
        indices = tf.constant([2]) if what == "of a constant" else places
        ones = tf.ones_like(indices, tf.float32)
        counts.scatter_add(tf.IndexedSlices(ones, indices))
        return tf.size(places)

    places = np.arange(rows, dtype=np.int32) % 4
    autodist.function(count)(places)
    expected = [0, 0, 1, 0] if what == "of a constant" else np.bincount(places, None, 4)
    np.testing.assert_allclose(tf.convert_to_tensor(counts), expected)
