# SPDX-License-Identifier: Apache-2.0
"""Gradients are those of one device, however often and of what they are taken."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist import helpers
from tests.autodist.programs import examples

X = np.arange(6, dtype=np.float32).reshape(3, 2) / 3
ROWS, LABELS = examples(12, 3), examples(24, 2)[:12]


def _twice(tape, loss, v, w):
    return tape.gradient(loss, v), tape.gradient(loss, w)


def _again(tape, loss, v, w):
    tape.gradient(loss, v)
    return _twice(tape, loss, v, w)


def _waiting(tape, loss, v, w):
    first = tape.gradient(loss, v)
    with tf.control_dependencies([first]):
        return first, tape.gradient(loss, w)


def _given(tape, loss, v, w):
    two = tf.constant(2.0)
    first = tape.gradient(loss, v, output_gradients=two)
    return first, tape.gradient(loss, w, output_gradients=two)


def _of_two(tape, loss, v, w):
    with tape:
        other = 2.0 * loss
    return tape.gradient(loss, v), tape.gradient([loss, other], w)


def _by_gradients(tape, loss, v, w):
    (first,), (second,) = tf.gradients(loss, v), tf.gradients(loss, w)
    return first, tape.gradient(loss, w) - second + second


def _trained(take, scope, function):
    with scope:
        v, w = tf.Variable([[0.3], [0.7]]), tf.Variable([0.5, 0.2])

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            rows = tf.tanh(tf.matmul(x, v)) * tf.reduce_sum(w**2) + w[0] * v[0, 0]
            loss = tf.reduce_mean(rows)
        first, second = take(tape, loss, v, w)
        v.assign_sub(first)
        w.assign_sub(second)

    function(step)(X)
    return v.numpy(), w.numpy()


@pytest.mark.battery(3)
@pytest.mark.parametrize(
    "take", [_twice, _again, _waiting, _given, _of_two, _by_gradients]
)
def test_gradients_of_one_loss_may_be_taken_several_times(take):
    autodist = helpers.make(2)
    actual = _trained(take, autodist.scope(), autodist.function)
    expected = _trained(take, tf.init_scope(), tf.function)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(4, 1, 3, 2), (1, 4), (2, 1, 2)])
@pytest.mark.parametrize("inside", [False, True])
def test_batches_smaller_than_the_number_of_replicas_train_as_others(sizes, inside):
    """The logarithm of a dummy example would be NaN, and must not count."""
    autodist = helpers.make(3)
    with autodist.scope():
        v = tf.Variable(1.0)
    w = tf.Variable(1.0)

    def step(variable, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.math.log(x * variable) ** 2)
        variable.assign_sub(0.1 * tape.gradient(loss, variable))
        return loss

    train = autodist.function(lambda x: step(v, x))
    if inside:  # where the number of examples is unknown
        spec = tf.TensorSpec([None], tf.float32)
        train = tf.function(train, input_signature=[spec])
    for size in sizes:
        x = np.arange(2, 2 + size, dtype=np.float32)
        np.testing.assert_allclose(train(x), step(w, tf.constant(x)), rtol=1e-5)
        np.testing.assert_allclose(v, w, rtol=1e-5)


def _by_examples(autodist: Any) -> Any:
    """Returns the results of steps, some on a tape, and the final variable."""
    with autodist.scope() if autodist else tf.init_scope():
        w = tf.Variable(examples(3, 2))
        optimizer = tf.keras.optimizers.Adam(0.1)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            ordered = tf.sort(tf.reduce_sum(tf.tanh(x @ w), 1))
            loss = tf.reduce_mean(ordered**2 * x[:, 0])
        by_w, by_x = tape.gradient(loss, [w, x])
        optimizer.apply_gradients([(by_w, w)])
        return loss, by_x, tf.sort(x[:, 0])[1]

    run = autodist.function(step) if autodist else tf.function(step)
    results = []
    for n, around in ((6, contextlib.nullcontext()), (5, tf.GradientTape())):
        with around:
            results.append(run(ROWS[:n]))
    return tf.nest.map_structure(np.asarray, (results, w.numpy()))


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_by_examples_are_those_of_one_device(num_replicas):
    actual = _by_examples(helpers.make(num_replicas, "sharded"))
    helpers.assert_equal(actual, _by_examples(None))


def test_gradients_by_what_is_no_variable_are_whole_where_nothing_is_split():
    autodist = helpers.make(2)
    with autodist.scope():
        w = tf.Variable([1.0, 2.0])

    @autodist.function
    def step() -> Any:
        one = tf.ones([])
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(one)
                loss = tf.reduce_sum((one * w) ** 3)
            by_w, by_one = tape.gradient(loss, [w, one])
            squares = tf.reduce_sum(by_w**2)
        return by_w, by_one, outer.gradient(squares, w)

    by_w, by_one, second = step()
    np.testing.assert_allclose(by_w, [3, 12])
    np.testing.assert_allclose(by_one, 27)
    np.testing.assert_allclose(second, [36, 288])  # of 9 w^4


def _before_a_function(autodist, change):
    """Returns a variable that a tf.function of the user's trains."""
    with autodist.scope() if autodist else tf.init_scope():
        w = tf.Variable(examples(3, 2))

    @tf.function
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - y) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))

    def step(x, y):
        train(*change(x, y))

    run = autodist.function(step) if autodist else tf.function(step)
    for n in (7, 4, 1):
        run(ROWS[:n], LABELS[:n])
    return w.numpy()


@pytest.mark.battery(3)
@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (x, y),
        lambda x, y: (x - tf.reduce_mean(x, 0), y / (1 + tf.math.reduce_std(y))),
        lambda x, y: (x, y[::-1]),
        lambda x, y: (tf.cumsum(x), y),
        lambda x, y: (tf.boolean_mask(x, x[:, 0] > 0), tf.boolean_mask(y, x[:, 0] > 0)),
    ],
    ids=["as they are", "less their mean", "reversed", "summed up", "some"],
)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_function_of_the_users_that_trains_is_given_the_whole_batch(
    change, num_replicas
):
    actual = _before_a_function(helpers.make(num_replicas), change)
    helpers.assert_equal(actual, _before_a_function(None, change), 1e-4)
