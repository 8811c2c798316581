# SPDX-License-Identifier: Apache-2.0
"""Losses of all kinds train functions, and sessions with tapes, as on one device."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import replicator
from tests.autodist import helpers
from tests.autodist.programs import SIZES, examples
from tests.autodist.test_function import OPTIMIZERS

v1 = tf.compat.v1
X, Y = examples(12, 3), examples(24, 2)[:12]
MASK = (np.arange(12) % 3 > 0).astype(np.float32)


def _count(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


@tf.function
def _in_a_function(rows):
    return 0.5 * tf.reduce_sum(rows)


def _in_a_loop(rows):
    _, total = tf.while_loop(
        lambda k, total: k < 3,
        lambda k, total: (k + 1, total + tf.reduce_mean(rows)),
        (0, 0.0),
    )
    return total


# Computed from rows of losses, the examples, their weights and a variable.
LOSSES = {
    "mean": lambda rows, x, m, w: tf.reduce_mean(rows),
    "sum": lambda rows, x, m, w: tf.reduce_sum(rows) * 0.1,
    "rows": lambda rows, x, m, w: rows,
    "L2": lambda rows, x, m, w: tf.nn.l2_loss(rows),
    "sum of rows": lambda rows, x, m, w: 0.1 * tf.reduce_sum(tf.reduce_mean(rows, 1)),
    "divided": lambda rows, x, m, w: tf.reduce_sum(rows) / _count(x),
    "divided rows": lambda rows, x, m, w: tf.reduce_sum(rows / _count(x)),
    "times the inverse": lambda rows, x, m, w: tf.reduce_sum(rows * (1 / _count(x))),
    "mean times n": lambda rows, x, m, w: 0.1 * tf.reduce_mean(rows) * _count(x),
    "keras": lambda rows, x, m, w: tf.keras.losses.MeanSquaredError()(Y[:1], rows),
    "keras sum": lambda rows, x, m, w: (
        0.1 * tf.keras.losses.MeanSquaredError("sum")(tf.zeros_like(rows), rows)
    ),
    "average": lambda rows, x, m, w: tf.nn.compute_average_loss(rows[:, 0], None, 7),
    "regularized": lambda rows, x, m, w: tf.reduce_mean(rows) + tf.nn.l2_loss(w),
    "weighted": lambda rows, x, m, w: (
        tf.reduce_sum(rows[:, 0] * m) / tf.reduce_sum(m) + tf.nn.l2_loss(w)
    ),
    "masked sum": lambda rows, x, m, w: (
        0.1 * tf.reduce_sum(tf.boolean_mask(rows, m > 0))
    ),
    "two": lambda rows, x, m, w: [tf.reduce_mean(rows), tf.nn.l2_loss(w)],
    "a function": lambda rows, x, m, w: _in_a_function(rows),
    "a loop": lambda rows, x, m, w: _in_a_loop(rows),
    "a branch": lambda rows, x, m, w: tf.cond(
        tf.reduce_sum(w) > 100,
        lambda: tf.reduce_mean(rows),
        lambda: 2 * tf.reduce_mean(rows),
    ),
    "only a variable": lambda rows, x, m, w: tf.nn.l2_loss(w),
}


def _train(autodist, family, loss_name, sizes=SIZES, inner=False):
    """Returns the results of all steps, and the variables."""
    with autodist.scope() if autodist else tf.init_scope():
        w, b = tf.Variable(examples(3, 2)), tf.Variable([0.5, -0.5])
        apply = OPTIMIZERS[family]([w, b])

    def step(x, y, m):
        with tf.GradientTape() as tape:
            rows = (tf.matmul(x, w) + b - y) ** 2
            loss = LOSSES[loss_name](rows, x, m, w)
        grads = tape.gradient(loss, [w, b], unconnected_gradients="zero")
        apply(grads)
        return loss

    step = tf.function(step) if inner else step
    run = autodist.function(step) if autodist else tf.function(step)
    values = [run(X[:n], Y[:n], MASK[-n:]) for n in sizes]
    return tf.nest.map_structure(np.asarray, (values, w.numpy(), b.numpy()))


@functools.cache
def _expected(family, loss_name):
    return _train(None, family, loss_name)


@pytest.mark.battery(12)
@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_loss_of_any_kind_trains_a_function_as_on_one_device(loss_name, num_replicas):
    actual = _train(helpers.make(num_replicas), "by hand", loss_name)
    helpers.assert_equal(actual, _expected("by hand", loss_name), 1e-4)


@pytest.mark.battery(5)
@pytest.mark.parametrize("family", OPTIMIZERS)
@pytest.mark.parametrize("loss_name", ["mean", "sum"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_means_and_sums_train_with_every_optimizer(family, loss_name, num_replicas):
    actual = _train(helpers.make(num_replicas, "sharded"), family, loss_name)
    helpers.assert_equal(actual, _expected(family, loss_name), 1e-4)


@pytest.mark.parametrize("loss_name", ["mean", "sum", "divided rows"])
def test_so_they_do_in_a_function_of_the_users(loss_name):
    actual = _train(helpers.make(2), "by hand", loss_name, inner=True)
    helpers.assert_equal(actual, _expected("by hand", loss_name), 1e-4)


RESULTS = {
    "sum": lambda x: tf.reduce_sum(x, 0),
    "mean": lambda x: tf.reduce_mean(x, 0),
    "max": lambda x: tf.reduce_max(x, 0),
    "min": lambda x: -tf.reduce_max(-x),
    "count": lambda x: tf.shape(x)[0],
    "right": lambda x: tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.int32)),
    "any": lambda x: tf.reduce_any(x > 1),
    "all": lambda x: tf.reduce_all(x > -1),
    "rows": lambda x: x + 1,
    "ratio": lambda x: tf.reduce_sum(x[:, 0]) / tf.reduce_sum(x[:, 1] ** 2),
    "some": lambda x: tf.boolean_mask(x, x[:, 0] > 0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_function_returns_is_that_of_all_examples(name):
    run = helpers.make(3).function(RESULTS[name])
    for n in SIZES:
        expected = RESULTS[name](tf.constant(X[:n]))
        np.testing.assert_allclose(run(X[:n]), expected, rtol=1e-4, atol=1e-5)


WHOLE = {
    "a root": lambda rows: tf.sqrt(tf.reduce_mean(rows)),
    "a maximum": lambda rows: tf.reduce_max(rows),
    "mixed": lambda rows: tf.reduce_sum(rows) + tf.reduce_mean(rows),
    "some of them": lambda rows: tf.reduce_mean(rows[1:]),
    "a shared sum": lambda rows: tf.reduce_sum(rows / tf.reduce_sum(rows)),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("form", ["function", "session"])
def test_losses_across_the_examples_train_as_on_one_device(name, form):
    def trained(num_replicas):
        autodist = helpers.make(num_replicas)
        if form == "function":
            return _root(autodist, WHOLE[name])
        return _in_a_session(autodist, lambda rows, x, w: WHOLE[name](rows), False)

    helpers.assert_equal(trained(2), trained(1), 1e-4)


def _root(autodist, make, **options):
    with autodist.scope():
        w = tf.Variable(examples(3, 2))

    @autodist.function(**options)
    def step(x):
        with tf.GradientTape() as tape:
            loss = make(tf.matmul(x, w) ** 2)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    step(X)
    return w.numpy()


def _in_a_session(autodist, make, tape, **options):
    """Returns a variable after two steps on a loss of rows and of the examples."""
    with tf.Graph().as_default(), autodist.scope():
        w = tf.Variable(examples(3, 2))
        x = v1.placeholder(tf.float32, [None, 3])
        if tape:
            with tf.GradientTape() as watching:
                loss = make(tf.matmul(x, w) ** 2, x, w)
            gradient = watching.gradient(loss, w)
        else:
            loss = make(tf.matmul(x, w) ** 2, x, w)
            (gradient,) = tf.gradients(loss, [w])
        train = w.assign_sub(gradient)
        session = autodist.create_distributed_session(**options)
        for n in (12, 7):
            session.run(train.op, {x: X[:n]})
        return session.run(w)


SESSIONS = ("mean", "sum", "rows", "divided rows", "weighted", "regularized")


@pytest.mark.battery(3)
@pytest.mark.parametrize("tape", [True, False])
@pytest.mark.parametrize("name", SESSIONS)
def test_sessions_train_with_losses_of_all_kinds(tape, name):
    def make(rows, x, w):
        return LOSSES[name](rows, x, tf.nn.relu(x[:, 0]), w)

    actual = _in_a_session(helpers.make(3), make, tape)
    w = tf.Variable(examples(3, 2))
    for n in (12, 7):
        with tf.GradientTape() as watching:
            loss = make(tf.matmul(X[:n], w) ** 2, X[:n], w)
        w.assign_sub(watching.gradient(loss, w))
    np.testing.assert_allclose(actual, w.numpy(), rtol=1e-4, atol=1e-5)


def test_what_a_function_is_told_of_a_loss_changes_nothing():
    def make(rows):
        total = tf.py_function(lambda r: tf.reduce_sum(r), [rows], tf.float32)
        return tf.ensure_shape(total, [])

    expected = _root(helpers.make(1), lambda rows: tf.reduce_sum(rows))
    with pytest.warns(DeprecationWarning, match=r"loss= of AutoDist\.function"):
        actual = _root(helpers.make(3), make, loss="sum")
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    for function in (
        lambda autodist: autodist.function(loss="some"),
        lambda autodist: _in_a_session(autodist, _first, False, loss=3),
    ):
        with pytest.raises(replicator.ArgumentError, match=r"(?s)loss=.*Fix"):
            function(helpers.make(2))


def _first(rows, x, w):
    return tf.reduce_mean(rows)


@pytest.mark.parametrize("name", ["normalized", "softmax"])
def test_batches_are_normalized_as_a_whole_in_functions(name, monkeypatch):
    monkeypatch.setattr(logging, "warning", pytest.fail)

    def make(rows):
        if name == "softmax":
            return tf.reduce_sum(tf.nn.softmax(rows) ** 2)
        return tf.reduce_sum((rows - tf.reduce_mean(rows, 0)) ** 2)

    actual = _root(helpers.make(2), make)
    np.testing.assert_allclose(actual, _root(helpers.make(1), make), rtol=1e-4)


# With tapes that differentiate another tape's gradients.
def _hessian(x, y, w, b):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.tanh(x @ w + b) ** 2)
    return tf.reduce_sum(tape.gradient(loss, w) * tf.constant([1.0, 2.0]))


def _inner_step(x, y, w, b):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.tanh(x @ w + b) ** 2)
    stepped = w - 0.1 * tape.gradient(loss, w)
    return tf.reduce_mean((tf.tanh(0.5 * x @ stepped + b) - y) ** 2)


def _weighted(x, y, w, b):
    weights = tf.abs(y[:, :1])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights * tf.tanh(x @ w) ** 2) / tf.reduce_sum(weights)
    squares = tf.reduce_sum(tape.gradient(loss, w) ** 2)
    return squares + tf.reduce_sum(weights * (x @ w)) / tf.reduce_sum(weights)


def _penalty(x, y, w, b):
    with tf.GradientTape() as tape:
        tape.watch(x)
        critic = tf.reduce_sum(tf.tanh(x @ w + b), 1)
    slopes = tape.gradient(critic, x)
    return tf.reduce_mean((tf.norm(slopes, axis=1) - 1) ** 2)


def _third(x, y, w, b):
    with tf.GradientTape() as outer:
        squares = _weighted(x, y, w, b)
    return tf.reduce_sum(outer.gradient(squares, w) ** 2)


NESTED = (_hessian, _inner_step, _weighted, _penalty, _third)


def _nested(autodist, make, form):
    """Returns variables after steps on 7, 4 and 1 examples."""
    batch = (X, Y)
    if form == "function" or autodist is None:
        with autodist.scope() if autodist else tf.init_scope():
            w, b = tf.Variable(examples(3, 2)), tf.Variable([0.5, -0.5])

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = make(x, y, w, b)
            for v, g in zip((w, b), tape.gradient(loss, [w, b]), strict=True):
                if g is not None:
                    v.assign_sub(0.1 * g)

        run = autodist.function(step) if autodist else tf.function(step)
        for n in (7, 4, 1):
            run(X[:n], Y[:n])
        return w.numpy(), b.numpy()
    with tf.Graph().as_default(), autodist.scope():
        w, b = tf.Variable(examples(3, 2)), tf.Variable([0.5, -0.5])
        batch = [v1.placeholder(tf.float32, [None, k]) for k in (3, 2)]
        with tf.GradientTape() as tape:
            loss = make(*batch, w, b)
        grads = tape.gradient(loss, [w, b])
        ops = [
            v.assign_sub(0.1 * g).op
            for v, g in zip((w, b), grads, strict=True)
            if g is not None
        ]
        session = autodist.create_distributed_session()
        for n in (7, 4, 1):
            session.run(ops, dict(zip(batch, (X[:n], Y[:n]), strict=True)))
        return tuple(session.run([w, b]))


@pytest.mark.battery(5)
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("form", ["function", "session"])
@pytest.mark.parametrize("make", NESTED, ids=lambda make: make.__name__)
def test_gradients_of_gradients_are_those_of_one_device(make, form, num_replicas):
    actual = _nested(helpers.make(num_replicas), make, form)
    helpers.assert_equal(actual, _nested(None, make, form), 1e-4)


def _given_gradients(x, y, w, b):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
    return tape.gradient(loss, w)


@pytest.mark.parametrize("form", ["function", "session"])
def test_a_second_step_from_weights_of_a_first_one_is_that_of_one_device(form):
    def twice(x, y, w, b):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w) ** 2)
        first = w - 0.1 * tape.gradient(loss, w)
        with tf.GradientTape() as tape:
            tape.watch(first)
            loss = tf.reduce_mean((x @ first) ** 2)
        second = first - 0.1 * tape.gradient(loss, first)
        return tf.reduce_mean((x @ second - y) ** 2)

    actual = _nested(helpers.make(2), twice, form)
    helpers.assert_equal(actual, _nested(None, twice, form), 1e-4)


def test_a_gradient_of_a_gradient_that_starts_from_a_given_one_is_that_of_one_device():
    results = []
    for autodist in (helpers.make(2), None):
        with autodist.scope() if autodist else tf.init_scope():
            w = tf.Variable(examples(3, 2))

        def step(x, w=w):
            with tf.GradientTape() as outer:
                gradient = _given_gradients(x, None, w, None)
            return outer.gradient(gradient, w, output_gradients=tf.ones([3, 2]))

        results.append((autodist.function(step) if autodist else tf.function(step))(X))
    helpers.assert_equal(*results, 1e-4)
