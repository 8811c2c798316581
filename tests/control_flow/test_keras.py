# SPDX-License-Identifier: Apache-2.0
"""Keras layers that communicate, and a recurrent network whose cell does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

XS = np.random.RandomState(0).randn(4, 5, 3).astype(np.float32)
UNITS = 4


class _Cell(tf.keras.layers.Layer):
    """A recurrent cell that is centred over the whole batch in each turn."""

    def __init__(self, repl: replicator.Replicator) -> None:
        super().__init__()
        self.state_size = self.output_size = UNITS
        self.dense = tf.keras.layers.Dense(UNITS)
        self.repl = repl

    def build(self, shape: Any) -> None:
        self.dense.build((shape[0], shape[-1] + UNITS))

    def call(self, x: tf.Tensor, states: Any) -> Any:
        h = self.dense(tf.concat([x, states[0]], -1))
        h = tf.tanh(h - self.repl.all_reduce(tf.reduce_mean(h, 0), "mean"))
        return h, [h]


def _plain_rnn(kernel: Any, bias: Any) -> tf.Tensor:
    h = tf.zeros([4, UNITS])
    for t in range(XS.shape[1]):
        h = tf.matmul(tf.concat([XS[:, t], h], -1), kernel) + bias
        h = tf.tanh(h - tf.reduce_mean(h, 0))
    return h


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_recurrent_network_whose_cell_communicates(mode: str, unroll: bool) -> None:
    repl = helpers.make(2)
    with repl.context():
        network = tf.keras.layers.RNN(_Cell(repl), unroll=unroll)
        network.build((None, *XS.shape[1:]))

    def step() -> Any:
        x = tf.constant(XS[2 * repl.replica_id :][:2])
        with tf.GradientTape() as tape:
            y = network(x)
            loss = tf.reduce_sum(y**2)
        gradients = tape.gradient(loss, network.trainable_variables)
        return y, repl.all_reduce(gradients)

    y, gradients = helpers.run(mode, repl, lambda: step)
    weights = [tf.constant(w) for w in network.get_weights()]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        want = _plain_rnn(*weights)
        loss = tf.reduce_sum(want**2)
    close = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(np.concatenate(list(y)), want, **close)
    for got, d in zip(gradients, tape.gradient(loss, weights), strict=True):
        for replica_values in got:
            np.testing.assert_allclose(replica_values, d, **close)


class _Centred(tf.keras.layers.Layer):
    """Subtracts the mean of the whole batch, and keeps a moving average of it."""

    def __init__(self, repl: replicator.Replicator) -> None:
        super().__init__()
        self.repl = repl

    def build(self, shape: Any) -> None:
        self.average = self.add_weight(shape=(shape[-1],), trainable=False)
        self.average.assign(tf.zeros_like(self.average))

    def compute_output_shape(self, shape: Any) -> Any:
        """Saves Keras a trial call while it builds the model, outside of a step."""
        return shape

    def call(self, x: tf.Tensor) -> tf.Tensor:
        mean = self.repl.all_reduce(tf.reduce_mean(x, 0), "mean")
        self.average.assign(0.5 * self.average + 0.5 * mean)
        return x - mean


@pytest.mark.parametrize("where", ["step", "function", "loop"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_layer_of_a_model_communicates(mode: str, where: str) -> None:
    repl = helpers.make(2)
    xs = XS[:, 0]
    with repl.context():
        layer = _Centred(repl)
        model = tf.keras.Sequential([tf.keras.layers.Dense(UNITS), layer])
        model.build((None, 3))
    function = tf.function(lambda x: model(x))

    def step() -> Any:
        x = tf.constant(xs[2 * repl.replica_id :][:2])
        if where == "function":
            return function(x)
        if where == "step":
            return model(x)
        return tf.while_loop(
            lambda n, y: n < 1,
            lambda n, y: (n + 1, model(x)),
            [tf.constant(0), tf.zeros([2, UNITS])],
        )[1]

    kernel, bias = model.get_weights()[:2]
    before = model.layers[-1].average.numpy()
    got = np.concatenate(list(helpers.run(mode, repl, lambda: step)))
    want = xs @ kernel + bias
    np.testing.assert_allclose(got, want - want.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        layer.average.numpy(), 0.5 * before + 0.5 * want.mean(0), rtol=1e-5, atol=1e-6
    )
    helpers.assert_replicas_equal(model.variables)


# --- Models that are built at their first call ----------------------------------------


def _dense(seed: int) -> tf.keras.layers.Layer:
    start = tf.keras.initializers.RandomNormal(seed=seed)
    return tf.keras.layers.Dense(UNITS, activation="tanh", kernel_initializer=start)


class Scaled(tf.keras.layers.Layer):
    """Has a weight, and centres over the whole batch."""

    def __init__(self, repl: replicator.Replicator) -> None:
        super().__init__()
        self.repl = repl

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        mean = self.repl.all_reduce(tf.reduce_mean(x, 0), "mean")
        return self.scale * (x - mean)


class Subclassed(tf.keras.Model):
    """Applies its layers, which it does not build by itself."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.inner = layers

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self.inner:
            x = layer(x)
        return x


def _functional(repl: replicator.Replicator) -> tf.keras.Model:
    inputs = tf.keras.Input([3])
    return tf.keras.Model(inputs, _dense(1)(Scaled(repl)(_dense(0)(inputs))))


def _layers(repl: replicator.Replicator) -> list[tf.keras.layers.Layer]:
    return [_dense(0), Scaled(repl), _dense(1)]


def _by_hand(repl: replicator.Replicator) -> Any:
    """Applies layers whose variables exist before the step."""
    layers = _layers(repl)
    for layer, size in zip(layers, (3, UNITS, UNITS), strict=True):
        layer.build((None, size))

    class Applied:
        trainable_variables = [v for layer in layers for v in layer.trainable_variables]

        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            for layer in layers:
                x = layer(x)
            return x

    return Applied()


MODELS = {
    "sequential": lambda repl: tf.keras.Sequential(_layers(repl)),
    "subclassed": lambda repl: Subclassed(_layers(repl)),
    "nested": lambda repl: Subclassed([tf.keras.Sequential(_layers(repl))]),
    "functional": _functional,
    "functional, nested": lambda repl: tf.keras.Sequential([_functional(repl)]),
}


def _trained(
    make: Callable[..., Any], mode: str, in_step: bool, **options: Any
) -> list[np.ndarray]:
    """Returns the losses of the second step with a model, which may be made in it."""
    repl = helpers.make(3, **options)
    xs = np.random.RandomState(0).randn(3, 4, 3).astype(np.float32)
    models: list[Any] = []

    def make_step() -> Callable[..., tf.Tensor]:
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))
        if not in_step:
            models.append(make(repl))

        def step(x: tf.Tensor) -> tf.Tensor:
            if not models:
                models.append(make(repl))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((models[0](x) - 1.0) ** 2)
            weights = models[0].trainable_variables
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return loss

        return step

    def input_fn(ctx: replicator.InputContext) -> Any:
        return lambda: tf.constant(xs[ctx.replica_id])

    losses = helpers.run(mode, repl, make_step, input_fn, steps=2)
    if mode != "session":
        helpers.assert_replicas_equal(models[0].trainable_variables)
    return losses


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        *((name, "eager", {}) for name in MODELS),
        ("subclassed", "function", {}),
        ("sequential", "session", {}),
        ("nested", "eager", {"variables": "sharded"}),
        ("sequential", "eager", {"build": "clone"}),
    ],
)
def test_a_model_built_at_its_first_call_trains_as_layers_built_before(
    name: str, mode: str, options: Any
) -> None:
    """Keras traces unbuilt layers once more, to infer their shapes."""
    in_step = name.startswith("functional")
    got = _trained(MODELS[name], mode, in_step, **options)
    want = _trained(_by_hand, mode, False)
    np.testing.assert_allclose(got, want, rtol=1e-5)
