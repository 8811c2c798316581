# SPDX-License-Identifier: Apache-2.0
"""The arguments of a user's tf.function that takes gradients of examples."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.autodist import helpers
from tests.autodist.programs import examples

X, Y = examples(12, 3), examples(24, 2)[:12]


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
        run(X[:n], Y[:n])
    return w.numpy()


def _less_their_mean(x, y):
    return x - tf.reduce_mean(x, 0), y / (1 + tf.math.reduce_std(y))


@pytest.mark.parametrize("change", [lambda x, y: (x, y), _less_their_mean])
def test_what_a_function_that_trains_is_given_is_of_the_whole_batch(change):
    actual = _before_a_function(helpers.make(3), change)
    helpers.assert_equal(actual, _before_a_function(None, change), 1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (x, y[::-1]),
        lambda x, y: (tf.cumsum(x), y),
        lambda x, y: (tf.boolean_mask(x, x[:, 0] > 0), tf.boolean_mask(y, x[:, 0] > 0)),
    ],
    ids=["reversed", "summed up", "some"],
)
def test_what_is_no_row_of_each_has_it_trained_on_the_whole_batch(change):
    actual = _before_a_function(helpers.make(2), change)
    helpers.assert_equal(actual, _before_a_function(None, change), 1e-4)
