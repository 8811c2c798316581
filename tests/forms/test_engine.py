# SPDX-License-Identifier: Apache-2.0
"""What a function of AutoDist may do that a function for one device may."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import strategy
from tests.autodist import helpers

X = np.random.default_rng(0).normal(size=[7, 3]).astype(np.float32)


def _variables_made_inside(autodist):
    """Returns losses and variables of a function that makes its own."""
    made = {}

    def step(x):
        if not made:
            made["w"] = tf.Variable(tf.ones([3, 2]) * 0.5, name="w")
            made["adam"] = tf.keras.optimizers.Adam(0.1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ made["w"]) ** 2)
        made["adam"].apply_gradients([(tape.gradient(loss, made["w"]), made["w"])])
        return loss

    run = autodist.function(step) if autodist else tf.function(step)
    losses = [float(run(X[:n])) for n in (7, 5, 2)]
    return losses, made["w"].numpy(), [v.numpy() for v in made["adam"].variables]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_variables_may_be_made_at_the_first_call(num_replicas):
    actual = _variables_made_inside(helpers.make(num_replicas))
    helpers.assert_equal(actual, _variables_made_inside(None))


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


def _compiled(autodist):
    with autodist.scope() if autodist else contextlib.nullcontext():
        w = tf.Variable(tf.ones([3, 1]))
    forward = tf.function(lambda x: tf.tanh(x @ w), jit_compile=True)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((forward(x) - 1.0) ** 2)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    run = autodist.function(step) if autodist else tf.function(step)
    return [float(run(X)) for _ in range(2)], w.numpy()


def test_a_compiled_function_inside_uses_variables():
    helpers.assert_equal(_compiled(helpers.make(2)), _compiled(None))


@pytest.mark.parametrize("plan", [strategy.PartitionedPS(), strategy.PS()])
def test_variables_in_parts_are_trained_and_returned(plan):
    def trained(autodist):
        with autodist.scope() if autodist else contextlib.nullcontext():
            table = tf.Variable(np.arange(12, dtype=np.float32).reshape(6, 2) / 10)
            sgd = tf.keras.optimizers.SGD(0.1)

        def step(ids):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table, ids) ** 2)
            gradient = tf.convert_to_tensor(tape.gradient(loss, table))
            sgd.apply_gradients([(gradient, table)])
            return loss, table

        run = autodist.function(step) if autodist else tf.function(step)
        returned = [run(np.int32([0, 1, 2, 5, 1])) for _ in range(2)]
        return tf.nest.map_structure(np.asarray, (returned, table.numpy()))

    helpers.assert_equal(trained(helpers.make(2, plan)), trained(None))


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_rows_of_sparse_ids_are_looked_up(num_replicas):
    autodist = helpers.make(num_replicas)
    with autodist.scope():
        table = tf.Variable(tf.ones([9, 4]))

    @autodist.function
    def step(ids):
        sparse = tf.sparse.from_dense(ids)
        looked_up = tf.nn.embedding_lookup_sparse(table, sparse, None)
        return tf.reduce_mean(looked_up**2)

    assert float(step(np.ones([12, 2], np.int64))) == 1


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
