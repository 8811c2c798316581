# SPDX-License-Identifier: Apache-2.0
"""Layers of Keras and Sonnet, random numbers, assertions and Python inside a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import sonnet as snt
import tensorflow as tf
import tf_keras

from replicator import Replicator
from tests.programs.program import (
    NO_SESSION,
    ONE_PROCESS,
    OWN_STATE,
    Step,
    program,
    rows,
)


def weights(*shape: int) -> tf.Variable:
    """Returns a variable with values of all kinds."""
    size = int(np.prod(shape))
    return tf.Variable(np.sin(np.arange(size)).reshape(shape).astype(np.float32))


# --- Layers ---------------------------------------------------------------------------


@program(None, OWN_STATE, ONE_PROCESS, inputs=rows, steps=2)
def normalization_and_dropout(repl: Replicator) -> Step:
    """Layers of Keras that have variables of their own."""
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=3)]
    for layer in layers:
        layer.build((None, 4))

    def step(x: tf.Tensor) -> Any:
        for layer in layers:
            x = layer(x, training=True)
        return x

    return step


@program(None, inputs=rows, steps=2)
def built_by_the_first_call(repl: Replicator) -> Step:
    """Layers whose first call, on replica 0, keeps tensors computed from constants."""
    layers = [
        keras.layers.Normalization(mean=np.arange(4.0), variance=np.ones(4)),
        keras.layers.Normalization(axis=None, mean=0.5, variance=2.0),
    ]
    kept: list[tf.Tensor] = []

    def step(x: tf.Tensor) -> Any:
        if not kept:
            kept.append(tf.range(4.0) * repl.num_replicas)
        return [layer(x) for layer in layers], x * kept[0]

    return step


@program(None, NO_SESSION, inputs=rows)
def preprocessing(repl: Replicator) -> Step:
    """Layers with statistics, bins, tables and constants, of both versions of Keras."""
    numbers = np.random.default_rng(0).normal(2.0, 3.0, [12, 4]).astype(np.float32)
    texts, counts = np.array([["a"], ["b"], ["c"]] * 4), np.arange(12)[:, None] % 5
    calls: list[tuple[Any, tf.Tensor | None]] = []  # a layer, and its own input
    for layers in (keras.layers, tf_keras.layers):
        adapted = (
            (layers.Normalization(), numbers),
            (layers.Discretization(num_bins=4), numbers),
            (layers.StringLookup(output_mode="tf_idf"), texts),
            (layers.IntegerLookup(), counts),
        )
        for layer, values in adapted:
            layer.adapt(values)
        calls += [(layer, None) for layer, _ in adapted[:2]]
        calls += [(layer, tf.constant(values)) for layer, values in adapted[2:]]
        calls += [
            (layers.CategoryEncoding(num_tokens=5), tf.constant(counts)),
            (layers.Hashing(num_bins=7), tf.constant(texts)),
            (layers.Rescaling(scale=0.1, offset=1.0), None),
        ]
    return lambda x: [layer(x if given is None else given) for layer, given in calls]


@program(None, NO_SESSION, inputs=rows)
def made_outside(repl: Replicator) -> Step:
    """Small eager tensors, which TensorFlow captures as constants, in all places."""
    small, names = tf.constant(3.0), tf.constant(["a", "c"])
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
    words = keras.layers.TextVectorization(
        vocabulary=["so", "it", "goes"], output_sequence_length=3
    )
    nested = tf.function(lambda x: x * small)

    def step(x: tf.Tensor) -> Any:
        y = tf.cond(x[0, 0] > 0.0, lambda: x * small, lambda: x - small)
        y = tf.while_loop(lambda y: y[0, 0] < small, lambda y: [y + small], [y])[0]
        return (
            repl.all_reduce(y + nested(x)),
            repl.all_reduce(small),
            lookup(names),
            words(tf.constant(["so it goes", "goes it"])),
            small,
        )

    return step


@program(None, inputs=rows, steps=2)
def built_in_step(repl: Replicator) -> Step:
    """A Sonnet model that replica 0 builds, in scopes that belong to no replica."""
    constant = snt.initializers.Constant
    net = snt.nets.MLP([3, 2], w_init=constant(0.1), b_init=constant(0.2))
    linear = snt.Linear(2)  # its initial value is a random op in the step
    optimizer = repl.wrap_optimizer(snt.optimizers.Momentum(0.1, 0.9))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = net(x)
            tf.debugging.assert_less(y, 100.0)  # its message names the tensor
            loss = tf.reduce_sum(y**2)
        trained = net.trainable_variables
        optimizer.apply(tape.gradient(loss, trained), trained)
        return loss, 0.0 * linear(x)

    return step


class _Cell(keras.layers.Layer):
    """A recurrent cell that is centred over the whole batch at each time."""

    def __init__(self, center: Callable[[tf.Tensor], tf.Tensor]) -> None:
        super().__init__()
        self.state_size = self.output_size = 3
        self.dense = keras.layers.Dense(3, kernel_initializer=_ramp)
        self.center = center

    def build(self, shape: Any) -> None:
        self.dense.build((shape[0], shape[-1] + 3))

    def call(self, x: tf.Tensor, states: Any) -> Any:
        h = self.dense(tf.concat([x, states[0]], -1))
        h = tf.tanh(h - self.center(h))
        return h, [h]


def _ramp(shape: Any, dtype: Any = None) -> tf.Tensor:
    """Initial values of all kinds."""
    return tf.reshape(tf.sin(tf.range(float(np.prod(shape)))), shape)


def _mean(h: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(h, 0)


def _sequences(count: int) -> tf.Tensor:
    values = np.random.default_rng(0).standard_normal((4, 2, 5, 2))
    return tf.constant(values[:count], tf.float32)


def _recurrent(
    unroll: bool, repl: Replicator | None, center: Callable[[tf.Tensor], tf.Tensor]
) -> Step:
    network = keras.layers.RNN(_Cell(center), unroll=unroll)
    network.build((None, 5, 2))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = network(x)
            loss = tf.reduce_sum(y**2)
        gradients = tape.gradient(loss, network.trainable_variables)
        return y, repl.all_reduce(gradients) if repl else gradients

    return step


def _plain_recurrent(count: int) -> Any:
    x = tf.reshape(_sequences(count), [-1, 5, 2])
    y, gradients = _recurrent(True, None, _mean)(x)
    return tf.split(y, count), [[gradient] * count for gradient in gradients]


for _unroll in (False, True):

    def _make(repl: Replicator, unroll: bool = _unroll) -> Step:
        center: Callable[[tf.Tensor], tf.Tensor] = lambda h: repl.all_reduce(  # noqa: E731
            _mean(h), "mean"
        )
        return _recurrent(unroll, repl, center)

    program(
        _plain_recurrent,
        NO_SESSION,
        inputs=lambda ctx: _sequences(4)[ctx.replica_id],
        name="recurrent_cell_that_communicates" + "_unrolled" * _unroll,
        close=1e-4,
    )(_make)


class Centred(keras.layers.Layer):
    """Has a weight, subtracts the mean of the whole batch, and keeps its average."""

    def __init__(self, repl: Replicator) -> None:
        super().__init__()
        self.repl = repl

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.average = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False
        )

    def compute_output_shape(self, shape: Any) -> Any:
        """Saves Keras a trial call while it builds the model, outside of a step."""
        return shape

    def call(self, x: tf.Tensor) -> tf.Tensor:
        mean = self.repl.all_reduce(tf.reduce_mean(x, 0), "mean")
        self.average.assign(0.5 * self.average + 0.5 * mean)
        return self.scale * (x - mean)


class Subclassed(keras.Model):
    """Applies its layers, which it does not build by itself."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.inner = layers

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self.inner:
            x = layer(x)
        return x


def _layers(repl: Replicator) -> list[Any]:
    dense = functools.partial(
        keras.layers.Dense, activation="tanh", kernel_initializer=_ramp
    )
    return [dense(4), Centred(repl), dense(4)]


def _functional(repl: Replicator) -> keras.Model:
    inputs = x = keras.Input([4])
    for layer in _layers(repl):
        x = layer(x)
    return keras.Model(inputs, x)


MODELS: dict[str, Callable[[Replicator], Any]] = {
    "sequential": lambda repl: keras.Sequential(_layers(repl)),
    "subclassed": lambda repl: Subclassed(_layers(repl)),
    "nested": lambda repl: Subclassed([keras.Sequential(_layers(repl))]),
    "functional": _functional,
    "functional_nested": lambda repl: keras.Sequential([_functional(repl)]),
}


def _plain_centred(count: int) -> Any:
    """The losses of the second step, and the average."""
    values = [np.random.default_rng(r).standard_normal((2, 4)) for r in range(count)]
    x = tf.constant(np.concatenate(values), tf.float32)
    w = [tf.Variable(_ramp([4, 4])), tf.Variable(tf.zeros([4])), tf.Variable([1.0] * 4)]
    w += [tf.Variable(_ramp([4, 4])), tf.Variable(tf.zeros([4]))]
    average = tf.zeros([4])
    for _ in range(2):
        with tf.GradientTape() as tape:
            y = tf.tanh(x @ w[0] + w[1])
            mean = tf.reduce_mean(y, 0)
            y = tf.tanh(w[2] * (y - mean) @ w[3] + w[4])
            each = tf.reduce_mean((tf.reshape(y, [count, 2, 4]) - 1.0) ** 2, [1, 2])
            loss = tf.reduce_mean(each)
        for variable, d in zip(w, tape.gradient(loss, w), strict=True):
            variable.assign_sub(0.5 * d)
        average = 0.5 * average + 0.5 * mean
    return list(each), [average] * count


def _centred(name: str, repl: Replicator) -> Step:
    """A model that communicates, and that its first call builds."""
    optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.5))
    models: list[Any] = []
    if not name.startswith("functional"):
        models.append(MODELS[name](repl))

    def step(x: tf.Tensor) -> Any:
        if not models:
            models.append(MODELS[name](repl))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((models[0](x) - 1.0) ** 2, [0, 1])
        trained = models[0].trainable_variables
        gradients = tape.gradient(loss, trained)
        optimizer.apply_gradients(zip(gradients, trained, strict=True))
        (average,) = models[0].non_trainable_variables
        return loss, tf.identity(average.value)

    return step


for _name in MODELS:
    program(_plain_centred, inputs=rows, steps=2, close=1e-4, name=f"centred_{_name}")(
        functools.partial(_centred, _name)
    )


# --- Random numbers -------------------------------------------------------------------


@program(None, inputs=rows)
def random_ops_with_seeds(repl: Replicator) -> Step:
    """In a branch too."""

    def step(x: tf.Tensor) -> Any:
        noise = tf.random.normal([3], seed=5)
        branch = tf.cond(
            tf.reduce_sum(x) > -100.0,
            lambda: tf.random.uniform([2], seed=6),
            lambda: tf.zeros([2]),
        )
        return noise, branch, tf.nn.dropout(x, 0.5, seed=7)

    return step


@program(None, OWN_STATE, ONE_PROCESS, inputs=rows, steps=2)
def generators_and_sums(repl: Replicator) -> Step:
    """Variables whose components differ, and are set in the step."""
    total = tf.Variable(
        0.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
    generator = tf.random.Generator.from_seed(3)

    def step(x: tf.Tensor) -> Any:
        total.assign(5.0)
        total.assign_add(tf.reduce_sum(x))
        before = generator.normal([2])
        generator.reset_from_seed(7)
        return total.read_value(), before, generator.normal([2])

    return step


# --- Assertions and Python ------------------------------------------------------------


@program(None, inputs=rows, steps=2)
def function_that_writes_and_asserts(repl: Replicator) -> Step:
    total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    @tf.function
    def add(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(x, 100.0)
        total.assign(total + repl.all_reduce(tf.reduce_sum(x), "max"))
        return total.read_value()

    return lambda x: add(x)


@program(None, ONE_PROCESS, inputs=rows)  # an op on the first device
def assertions(repl: Replicator) -> Step:
    """They name their tensors and devices."""

    @tf.function
    def inside(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(x + 1.0, 100.0)
        return x

    def step(x: tf.Tensor) -> Any:
        y = x * 2.0
        tf.debugging.assert_less(y, 100.0, message="too large")
        tf.debugging.assert_near(y, y + 1e-9)
        tf.debugging.assert_equal(tf.shape(y)[0], 2)
        tf.debugging.assert_all_finite(y, "not finite")
        tf.debugging.Assert(tf.reduce_all(y < 100.0), [y.name, y])
        with tf.device(repl.devices[0]):
            tf.debugging.assert_less(y, 100.0)
        return tf.cond(y[0, 0] > 0.0, lambda: inside(y), lambda: inside(-y))

    return step


def _scaled(factor: float, x: Any) -> Any:
    return x * factor


@program(None, inputs=rows)
def python_functions(repl: Replicator) -> Step:
    """Closures of all kinds, with gradients, in a branch too."""
    w = weights(4, 3)

    class Scale:
        by = 3.0

        def __call__(self, x: Any) -> Any:
            return x * self.by

        def method(self, x: Any) -> Any:
            return x + self.by

    scale = Scale()

    def step(x: tf.Tensor) -> Any:
        number = 2.0

        def python(function: Callable[..., Any], x: tf.Tensor) -> tf.Tensor:
            y = tf.py_function(function, [x], tf.float32)
            y.set_shape(x.shape)
            return y

        with tf.GradientTape() as tape:
            y = python(lambda x: tf.sin(x) * number, tf.matmul(x, w))
            loss = tf.reduce_sum(python(scale, y) + python(scale.method, y))
        branch = tf.cond(loss > 0.0, lambda: python(lambda x: x / number, x), lambda: x)
        return (
            repl.all_reduce(tape.gradient(loss, w), "mean"),
            branch,
            tf.numpy_function(lambda x: x + np.float32(number), [x], tf.float32),
            python(functools.partial(_scaled, number), x),
        )

    return step
