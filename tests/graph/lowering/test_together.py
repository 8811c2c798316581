# SPDX-License-Identifier: Apache-2.0
"""Gradients that are taken one by one travel together, unless one needs another."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist import helpers

X = np.random.default_rng(0).normal(size=[6, 2]).astype(np.float32)


def _by_itself(v, w, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x * v + w) ** 2)
    return tape.gradient(loss, [v, w])


def _after_another(v, w, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x * v) ** 2)
    (first,) = tape.gradient(loss, [v])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(x * w) * tf.reduce_sum(first)
    return [first, tape.gradient(loss, w)]


def _in_order(v, w, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x * v) ** 2)
    (first,) = tape.gradient(loss, [v])
    with tf.control_dependencies([first]), tf.GradientTape() as tape:
        loss = tf.reduce_mean((x * w) ** 2)
        return [first, tape.gradient(loss, w)]


@pytest.mark.parametrize(
    ("gradients", "calls"),
    [(_by_itself, 1), (_after_another, 2), (_in_order, 2)],
)
def test_what_needs_nothing_of_another_travels_with_it(gradients, calls):
    autodist = helpers.make(2)
    with autodist.scope():
        v, w = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
    found = autodist.function(lambda x: gradients(v, w, x))(X)
    expected = gradients(v, w, tf.constant(X))
    for own, one in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5)
    assert len(list(autodist.replicator.plan)) == calls
