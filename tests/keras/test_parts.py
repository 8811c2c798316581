# SPDX-License-Identifier: Apache-2.0
"""A model's metrics, losses and optimizers are found wherever they are."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import replicator
from replicator.keras import parts
from tests import helpers
from tests.keras.worlds import World, check, numbers

layers = keras.layers
X, Y = numbers(0, 17, 8), numbers(1, 17, 3)
FIT: dict[str, Any] = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}


class Inner(keras.Model):
    """A model with its own metric, which the outer one does not list."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)
        self.size = keras.metrics.Mean()

    def call(self, x: Any) -> Any:
        y = self.dense(x)
        self.size.update_state(tf.reduce_mean(y))
        return y


class Outer(keras.Model):
    """Reports a metric of a model inside a model inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "size": self.inner.size.result()}


def test_metrics_that_a_model_does_not_list() -> None:
    def program(world: World) -> Any:
        def make() -> Any:
            model = Outer()
            model.compile("sgd", "mse")
            return model

        return world.made(make).fit(X, Y, **FIT).history

    check(program, [2, 3])


class TwoOptimizers(keras.Model):
    """Keeps its optimizers in a list or in a dict."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two = layers.Dense(3), layers.Dense(3)
        self.how = how

    def compile(self, **about: Any) -> None:
        super().compile(**about)
        made = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)]
        self.several = (
            dict(zip("ab", made, strict=True)) if self.how == "dict" else made
        )

    def call(self, x: Any) -> Any:
        return self.one(x) + self.two(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        values = self.several.values() if self.how == "dict" else self.several
        for layer, optimizer in zip((self.one, self.two), list(values), strict=True):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            v = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, v), v, strict=True))
        return {"loss": loss}


@pytest.mark.battery(5)
@pytest.mark.parametrize("how", ["list", "dict"])
def test_optimizers_in_containers_are_wrapped(how: str) -> None:
    def program(world: World) -> Any:
        def make() -> Any:
            model = TwoOptimizers(how)
            model.build([None, 8])
            model.compile(loss="mse")
            return model

        return world.made(make).fit(X, Y, **FIT).history

    check(program, [3])


class OwnArguments(keras.Model):
    """Compares examples, by a compute_loss with its own arguments."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.dense, self.how = layers.Dense(3), how

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compute_loss(self, one: Any, other: Any, scale: float = 1.0) -> Any:
        return scale * tf.reduce_mean(tf.nn.softmax(one @ tf.transpose(other)) ** 2)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            if self.how == "positions":
                loss = self.compute_loss(z, y)
            else:
                loss = self.compute_loss(other=y, one=z, scale=2.0)
        v = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, v), v, strict=True))
        return {"loss": loss}


@pytest.mark.battery(5)
@pytest.mark.parametrize("how", ["positions", "names"])
def test_compute_loss_may_have_arguments_of_its_own(how: str) -> None:
    def program(world: World) -> Any:
        def make() -> Any:
            model = OwnArguments(how)
            model.compile("sgd")
            return model

        model = world.made(make)
        return model.fit(X, Y, **FIT).history, model.get_weights()

    check(program, [2, 3])


def test_losses_along_the_axis_of_the_batch() -> None:
    def program(world: World) -> Any:
        def make() -> Any:
            model = keras.Sequential([keras.Input([8]), layers.Dense(3)])
            model.compile("sgd", keras.losses.CosineSimilarity(axis=0))
            return model

        model = world.made(make)
        return model.fit(X, Y, **FIT).history, model.get_weights()

    check(program, [3])


def test_stateful_layers_are_refused() -> None:
    repl = helpers.make(2)
    with repl.context():
        model = keras.Sequential(
            [keras.Input(batch_shape=[4, 5, 2]), layers.LSTM(3, stateful=True)]
        )
        model.compile("sgd", "mse")
    with pytest.raises(replicator.ArgumentError, match="(?s)stateful.*test_parts.py"):
        repl.keras_model(model)


def test_sequences_of_many_lengths_are_traced_twice() -> None:
    traced = []

    class Counting(layers.Layer):
        def call(self, x: Any) -> Any:
            traced.append(x.shape)
            return tf.reduce_sum(x, axis=1)

    repl = helpers.make(2, build="trace")
    with repl.context():
        model = keras.Sequential([keras.Input([None, 3]), Counting()])
        model.compile("sgd", "mse")
    repl.keras_model(model)
    traced.clear()
    for length in range(1, 9):
        x = numbers(0, 4, length, 3)
        expected = x.sum(axis=1)
        assert abs(model.predict_on_batch(x) - expected).max() < 1e-5
    assert len(traced) == 2  # for one device


def test_what_is_inside_is_found_once() -> None:
    model = Inner()
    model.more = {"again": [model.dense], "inner": Outer()}
    actual = list(parts.inside(model))
    assert model.size in actual and model.dense in actual
    assert len({id(one) for one in actual}) == len(actual)
    assert model.more["inner"] not in actual
