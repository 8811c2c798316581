# SPDX-License-Identifier: Apache-2.0
"""Objects that assign to their variables while being built: built once, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from tests import helpers

WAYS = {
    "one": (1, {}),
    "mirrored": (2, {}),
    "sharded": (2, {"variables": "sharded"}),
    "clone": (3, {"build": "clone"}),
}
CONTEXT_ERROR = r"(?s)variable \S*{}.*at {} in .*\nFix: .*and build it there"
ADAMS = {
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.ScheduleFreeAdamW(0.1), 4.0
    ),
}
X = np.array([[1.0, 2.0]], np.float32)

ways = pytest.mark.parametrize("way", WAYS)


def make(way: str) -> replicator.Replicator:
    replicas, options = WAYS[way]
    return helpers.make(replicas, **{"build": "trace", **options})


def update(optimizer: Any, variable: Any, combine: Any = lambda g: g) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable**4) * 0.1
        if hasattr(optimizer, "scale_loss"):
            loss = optimizer.scale_loss(loss)
    gradient = combine(tape.gradient(loss, variable))
    optimizer.apply_gradients([(gradient, variable)])


# --- Optimizers -----------------------------------------------------------------------


@pytest.mark.battery(5)
@ways
@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "eager") for name in ADAMS), ("ScheduleFreeAdamW", "function")],
)
def test_optimizer_built_in_the_step_equals_one_device(
    way: str, name: str, mode: str
) -> None:
    alone, optimizer = tf.Variable(X), ADAMS[name]()
    for _ in range(5):
        update(optimizer, alone)

    repl = make(way)
    with repl.context():
        variable = tf.Variable(X)
        wrapped = repl.wrap_optimizer(ADAMS[name]())

    def step_fn() -> None:
        update(wrapped, variable)

    run = tf.function(lambda: repl.run(step_fn)) if mode == "function" else None
    for _ in range(5):
        run() if run is not None else repl.run(step_fn)
    helpers.assert_replicas_equal([variable])
    np.testing.assert_allclose(variable.numpy(), alone.numpy(), rtol=1e-5)


@ways
def test_optimizer_that_assigns_when_built_is_refused_in_a_graph(way: str) -> None:
    repl = make(way)
    with tf.Graph().as_default():
        with repl.context():
            variable = tf.Variable(X)
            optimizer = repl.wrap_optimizer(keras.optimizers.ScheduleFreeAdamW(0.1))
        for _ in range(2):  # the first error leaves no state that the second relies on
            with pytest.raises(
                replicator.errors.ContextError,
                match=r"(?s)ScheduleFreeAdamW assigns to variable \S*momentum.*at "
                r"\S*test_unbuilt.py:\d+ in update.*Fix: use it eagerly or in a tf.f",
            ):
                repl.run(lambda: update(optimizer, variable))


@ways
@pytest.mark.parametrize("wrapped", [True, False])
def test_optimizer_that_builds_itself_by_a_step_is_refused_for_good(
    way: str, wrapped: bool
) -> None:
    """Made inside step_fn, or outside and not wrapped."""
    repl = make(way)
    with repl.context():
        variable = tf.Variable(X)
        optimizer = keras.optimizers.ScheduleFreeAdamW(0.1)

    def step_fn() -> None:
        if wrapped:
            inside = repl.wrap_optimizer(keras.optimizers.ScheduleFreeAdamW(0.1))
            update(inside, variable)
        else:
            update(optimizer, variable, repl.all_reduce)

    message = CONTEXT_ERROR.format("momentum", r"\S*test_unbuilt.py:\d+")
    for _ in range(3):
        with pytest.raises(replicator.errors.ContextError, match=message):
            repl.run(step_fn)
    np.testing.assert_array_equal(variable.numpy(), X)


@ways
def test_adam_made_inside_the_step_trains(way: str) -> None:
    alone, optimizer = tf.Variable(X), ADAMS["Adam"]()
    repl = make(way)
    with repl.context():
        variable = tf.Variable(X)

    def step_fn() -> None:
        update(repl.wrap_optimizer(ADAMS["Adam"]()), variable)

    for _ in range(3):
        update(optimizer, alone)
        repl.run(step_fn)
    np.testing.assert_allclose(variable.numpy(), alone.numpy(), rtol=1e-5)


def test_optimizer_whose_build_fails_is_not_taken_for_built() -> None:
    class Failing(keras.optimizers.ScheduleFreeAdamW):
        fails = True

        def assign(self, variable: Any, value: Any) -> None:
            if self.fails:
                raise KeyError("once")
            super().assign(variable, value)

    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(X)
        optimizer = repl.wrap_optimizer(Failing(0.1))

    def step_fn() -> None:
        update(optimizer, variable)

    with pytest.raises(KeyError):
        repl.run(step_fn)
    Failing.fails = False
    repl.run(step_fn)
    alone = tf.Variable(X)
    update(ADAMS["ScheduleFreeAdamW"](), alone)
    np.testing.assert_allclose(variable.numpy(), alone.numpy(), rtol=1e-5)


# --- Layers ---------------------------------------------------------------------------


class Weights(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.ones = self.add_weight(shape=(shape[-1],), initializer="zeros", name="one")
        self.ones.assign(tf.ones([shape[-1]]))

    def call(self, x: Any) -> Any:
        return x * self.ones


class Variables(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.ones = tf.Variable(tf.zeros(shape[-1]), name="one")
        self.ones[:1].assign([1.0])

    def call(self, x: Any) -> Any:
        return x * self.ones


class Around(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Variables()

    def call(self, x: Any) -> Any:
        return self.inner(x)


class Lazy:
    ones: Any = None

    def __call__(self, x: Any) -> Any:
        if self.ones is None:
            self.ones = tf.Variable(tf.zeros(2), name="one")
            self.ones.assign(tf.ones(2))
        return x * self.ones


class Module(snt.Module):
    @snt.once
    def _initialize(self) -> None:
        self.ones = tf.Variable(tf.zeros(2), name="one")
        self.ones.assign(tf.ones(2))

    def __call__(self, x: Any) -> Any:
        self._initialize()
        return x * self.ones


REFUSED: dict[str, Callable[[], Any]] = {
    "weights": Weights,
    "variables": Variables,
    "sequential": lambda: keras.Sequential([Weights()]),
    "subclassed": Around,
    "lazy": Lazy,
    "sonnet": Module,
}


@pytest.mark.battery(5)
@ways
@pytest.mark.parametrize("name", REFUSED)
def test_layer_that_assigns_when_built_is_refused_for_good(way: str, name: str) -> None:
    if way in ("one", "clone") and name in ("lazy", "sonnet"):
        return  # one trace cannot tell it from a variable that each step writes
    repl = make(way)
    with repl.context():
        layer, anew = REFUSED[name](), REFUSED[name]()
        expected = anew(tf.constant(X)).numpy()
    message = CONTEXT_ERROR.format("one", r"\S*test_unbuilt.py:\d+")
    for _ in range(3):
        with pytest.raises(replicator.errors.ContextError, match=message):
            repl.run(lambda: layer(tf.constant(X)))
    for value in repl.run(lambda: anew(tf.constant(X))):  # the suggested fix
        np.testing.assert_array_equal(value, expected)


def test_variable_is_right_again_once_it_is_assigned_outside() -> None:
    repl = helpers.make(2, build="trace")
    with repl.context():
        layer = Lazy()

    def step_fn() -> Any:
        return layer(tf.constant(X))

    with pytest.raises(replicator.errors.ContextError):
        repl.run(step_fn)
    layer.ones.assign(tf.ones(2))
    for value in repl.run(step_fn):
        np.testing.assert_array_equal(value, X)


class LegacyWeights(tf_keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.ones = self.add_weight(shape=(shape[-1],), initializer="zeros")
        self.ones.assign(tf.ones([shape[-1]]))

    def call(self, x: Any) -> Any:
        return x * self.ones


class Counting(keras.Model):
    """Has no build: Keras calls it to build it, which must not count as a step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = tf.Variable(0.0)
        self.dense = keras.layers.Dense(2, kernel_initializer="ones")
        self.normalize = keras.layers.BatchNormalization()

    def call(self, x: Any) -> Any:
        self.count.assign_add(1.0)
        return self.normalize(self.dense(x) * self.count, training=True)


ACCEPTED: dict[str, Callable[[], Any]] = {
    "legacy": LegacyWeights,
    "legacy_sequential": lambda: tf_keras.Sequential([LegacyWeights()]),
    "legacy_weights": lambda: tf_keras.layers.Embedding(4, 2, weights=[X[[0] * 4]]),
    "counting": Counting,
}


@pytest.mark.battery(5)
@ways
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ACCEPTED)
def test_layer_that_is_built_at_once_equals_one_device(
    way: str, inside: bool, name: str
) -> None:
    x = tf.constant([[1]]) if name == "legacy_weights" else tf.constant(X)
    alone = tf.function(ACCEPTED[name](), autograph=False)
    repl = make(way)
    with repl.context():
        layer = ACCEPTED[name]()

    def step_fn() -> Any:
        return (ACCEPTED[name]() if inside else layer)(x)

    for _ in range(2):
        expected = alone(x)
        values = repl.run(step_fn)
        if name == "counting":  # the number of Keras' calls is not specified
            expected = values[0]
        for value in values:
            np.testing.assert_array_equal(value, expected)
