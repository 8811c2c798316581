# SPDX-License-Identifier: Apache-2.0
"""Gradients count once, however often and in whatever order they are taken."""

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist import helpers

X = np.arange(6, dtype=np.float32).reshape(3, 2) / 3


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
