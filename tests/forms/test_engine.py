# SPDX-License-Identifier: Apache-2.0
"""What a function of AutoDist may do that a function for one device may."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests.autodist import helpers

X = np.random.default_rng(0).normal(size=[7, 3]).astype(np.float32)


def test_a_variable_that_each_trace_makes_is_one_variable():
    @helpers.make(2).function
    def count(x, by):
        v = tf.Variable(0.0)
        return v.assign_add(by * tf.ones([]))

    assert [float(count(X, by)) for by in (1.0, 2.0, 1.0)] == [1, 3, 4]


def test_a_function_may_call_another_and_be_called_by_one():
    autodist = helpers.make(2)
    with autodist.scope():
        n = tf.Variable(0)

    @autodist.function
    def scaled(x, by=2.0):
        n.assign_add(1)
        return x * by, tf.reduce_sum(x)

    @autodist.function
    def outer(x):
        rows, total = scaled(x, by=3.0)
        return tf.reduce_mean(rows) + total

    np.testing.assert_allclose(outer(X), X.mean() * 3 + X.sum(), rtol=1e-4)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def plain(x):
        return scaled(x)

    for k in (7, 1, 2):  # one row is computed whole by both replicas
        rows, total = plain(X[:k])
        np.testing.assert_allclose(rows, X[:k] * 2)
        np.testing.assert_allclose(total, X[:k].sum(), rtol=1e-4)
    assert int(n) == 4


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_texts_are_printed_once(num_replicas, capfd):
    @helpers.make(num_replicas).function
    def told(x):
        tf.print("total", tf.reduce_sum(tf.ones_like(x)))
        for _ in tf.range(2):
            tf.print("turn")

    told(X)
    err = capfd.readouterr().err
    assert err.count("total 21\n") == 1 and err.count("turn\n") == 2


def test_errors_of_steps_name_the_users_line():
    @helpers.make(2).function
    def inverted(x):
        return tf.linalg.inv(tf.transpose(x) @ x * 0.0)

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        inverted(X)
    (note,) = caught.value.__notes__
    assert "test_engine.py:" in note and "in inverted" in note


def test_plain_variables_of_outside_are_read_only():
    w = tf.Variable(2.0)
    autodist = helpers.make(3)
    np.testing.assert_array_equal(autodist.function(lambda x: x * w)(X), X * 2)

    @autodist.function
    def write(x):
        w.assign_add(1.0)

    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)outside of the context.*test_engine\.py:\d+",
    ):
        write(X)
