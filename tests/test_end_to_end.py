# SPDX-License-Identifier: Apache-2.0
"""The programs with which the guide and the paper begin; others: tests/programs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

v1 = tf.compat.v1

STEPS = 5
BATCH = 8
_random = np.random.RandomState(0)
IMAGES = _random.randn(STEPS * BATCH, 6).astype(np.float32)
LABELS = _random.randint(0, 3, STEPS * BATCH).astype(np.int32)
_INITIAL = _random.randn(6, 3).astype(np.float32)


def _dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((IMAGES, LABELS))


def _loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )


def _plain_losses(rate: float = 0.5) -> list[float]:
    """Trains a linear model by SGD on one device; returns the losses."""
    weights = tf.Variable(_INITIAL)
    losses = []
    for images, labels in _dataset().batch(BATCH):
        with tf.GradientTape() as tape:
            loss = _loss(labels, images @ weights)
        weights.assign_sub(rate * tape.gradient(loss, weights))
        losses.append(float(loss))
    return losses


def _sharded_batches(ctx: replicator.InputContext) -> tf.data.Dataset:
    """Gives replica i of R the examples i, i + R, ... of each global batch."""
    return (
        _dataset()
        .shard(ctx.num_pipelines, ctx.pipeline_id)
        .batch(ctx.per_replica_batch_size(BATCH))
    )


# --- The example of the design -------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_ten_line_example(replicas):
    repl = helpers.make(replicas)

    with repl.context():
        model = tf.keras.Sequential(
            [tf.keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros")]
        )
        model.build([None, 6])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))
    model.layers[0].kernel.assign(_INITIAL)

    def step_fn(batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = _loss(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return repl.all_reduce(loss, "mean")

    losses = [repl.run(step_fn, _sharded_batches) for _ in range(STEPS)]
    with pytest.raises(tf.errors.OutOfRangeError):
        repl.run(step_fn, _sharded_batches)
    for step_losses in zip(*losses, strict=True):
        np.testing.assert_allclose(step_losses, _plain_losses(), rtol=1e-5)
    helpers.assert_replicas_equal(model.variables)


# --- The program of the TF-Replicator paper ------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_session_program_in_the_style_of_the_paper(replicas):
    repl = helpers.make(replicas)

    def step_fn(batch):
        images, labels = batch
        weights = v1.get_variable("weights", initializer=tf.constant(_INITIAL))
        loss = _loss(labels, images @ weights)
        optimizer = repl.wrap_optimizer(v1.train.GradientDescentOptimizer(0.5))
        with tf.control_dependencies([optimizer.minimize(loss, var_list=[weights])]):
            return tf.identity(loss)

    losses = []
    with tf.Graph().as_default():
        per_replica_loss = repl.run(step_fn, _sharded_batches)
        train_loss = tf.reduce_mean(per_replica_loss)
        (weights,) = v1.trainable_variables()
        with helpers.monitored_session() as session:
            while not session.should_stop():
                losses.append(session.run(train_loss))
                final = session.run(weights.components) if len(losses) == 4 else None
                if final is not None:
                    for value in final[1:]:
                        assert value.tobytes() == final[0].tobytes()
    np.testing.assert_allclose(losses, _plain_losses(), rtol=1e-5)
