# SPDX-License-Identifier: Apache-2.0
"""Whole programs as users write them, against plain TensorFlow on the whole batch."""

from __future__ import annotations

from typing import Any

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


# --- Models of all kinds -------------------------------------------------------------


class _Subclassed(tf.keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = tf.keras.layers.Dense(
            3, use_bias=False, kernel_initializer=tf.constant_initializer(_INITIAL)
        )

    def call(self, x, training=False):
        return self.dense(x)


class _Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = tf.Variable(_INITIAL)

    def __call__(self, x, training=False):
        return x @ self.weights


class _Lazy(tf.Module):
    """Creates its variable at the first call, as Sonnet's modules do."""

    def __call__(self, x, training=False):
        if not hasattr(self, "weights"):
            self.weights = tf.Variable(_INITIAL)
        return x @ self.weights


class _Compiled(_Module):
    """Its call is a tf.function of its own."""

    @tf.function
    def __call__(self, x, training=False):
        return x @ self.weights


MODELS = {
    "keras subclass": _Subclassed,
    "module": _Module,
    "lazy module": _Lazy,
    "compiled module": _Compiled,
    "sonnet": None,
}


def _make_sonnet() -> Any:
    """Returns a Sonnet module with the same initial value."""
    sonnet = pytest.importorskip("sonnet")

    class Initial(sonnet.initializers.Initializer):
        def __call__(self, shape, dtype):
            return tf.constant(_INITIAL)

    linear = sonnet.Linear(3, with_bias=False, w_init=Initial())
    return lambda x, training=False: linear(x)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", ["eager", "function", "loop"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_train_as_on_the_whole_batch(kind, mode):
    repl = helpers.make(2)
    with repl.context():
        model = (MODELS[kind] or _make_sonnet)()
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))

    def step_fn(batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = _loss(labels, model(images, training=True))
        variables = tape.watched_variables()
        optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables, strict=True)
        )
        return repl.all_reduce(loss, "mean")

    def run():
        return repl.run(step_fn, _sharded_batches)[0]

    if mode == "loop":
        run()  # creates lazy variables outside of the loop

        @tf.function
        def loop():
            losses = tf.TensorArray(tf.float32, STEPS - 1)
            for k in tf.range(STEPS - 1):
                losses = losses.write(k, run())
            return losses.stack()

        np.testing.assert_allclose(loop(), _plain_losses()[1:], rtol=1e-5)
        return
    call = tf.function(run) if mode == "function" else run
    losses = [float(call()) for _ in range(STEPS)]
    np.testing.assert_allclose(losses, _plain_losses(), rtol=1e-5)


# --- Python on tensors ---------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_autograph_converts_the_step(mode):
    repl = helpers.make(2)

    def halved(x):  # a helper, which is converted too
        while x > 1.0:
            x = x / 2.0
        return x

    def step_fn(x):
        x = tf.cast(x, tf.float32)
        if x > 2.0:
            y = halved(x)
        else:
            y = x * 10.0
        for k in tf.range(3):
            if k == 1:
                continue
            y += tf.cast(k, tf.float32)
        return repl.all_reduce(y, "sum"), y

    def input_fn():
        return tf.data.Dataset.from_tensor_slices([1, 5, 8, 2])

    call = repl.build(step_fn, input_fn)
    call = tf.function(call) if mode == "function" else call
    for own in ([12.0, 2.625], [3.0, 22.0]):
        total, local = call()
        assert [float(v) for v in local] == own
        assert [float(v) for v in total] == [sum(own)] * 2


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_nested_function_has_each_replicas_variables_and_gradients(mode):
    repl = helpers.make(3)

    def make_step():
        weight = tf.Variable(2.0)
        count = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

        @tf.function
        def helper(x):
            count.assign_add(x)
            return weight * weight * x

        def step_fn():
            x = tf.constant(repl.replica_id + 1.0)
            with tf.GradientTape() as tape:
                y = helper(x) + helper(2.0 * x)
            gradient = tape.gradient(y, weight)  # 2 w 3 x
            weight.assign_sub(repl.all_reduce(gradient, "mean") / 24.0)  # 24 w / 24
            return y, gradient, count.read_value()

        return step_fn

    y, gradient, count = helpers.run(mode, repl, make_step)
    own = np.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(y, 4 * 3 * own)
    np.testing.assert_allclose(gradient, 2 * 2 * 3 * own)
    np.testing.assert_allclose(count, 3 * own)
