# SPDX-License-Identifier: Apache-2.0
"""A model's metrics, losses and optimizers are found wherever they are."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.keras import state
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


class Noting(layers.Layer):
    """Notes with which shapes it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def call(self, x: Any) -> Any:
        self.noted.append(tuple(x.shape))
        return x


class Around(keras.Model):
    """Does not say which sizes its inputs have."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside

    def call(self, x: Any) -> Any:
        return self.inside(x)


def _of_sequences(declared: bool) -> tuple[Any, list[Any]]:
    """Returns a model, and the shapes with which it is called."""
    noting = Noting()
    model = keras.Sequential([keras.Input([None, 3]), noting, layers.Dense(3)])
    model = model if declared else Around(model)
    model.compile("sgd", "mse")
    model(np.zeros([1, 1, 3]))
    return model, noting.noted


@pytest.mark.parametrize("declared, wanted", [(False, 2), (True, 1)])
@pytest.mark.parametrize(
    "name", ["train", "predict", pytest.param("test", marks=pytest.mark.slow)]
)
def test_traces_and_builds_do_not_grow_with_lengths(
    name: str, declared: bool, wanted: int
) -> None:
    """Lengths that keras.Input leaves open are unknown from the beginning."""
    repl = helpers.make(2)
    with repl.context():
        model, noted = _of_sequences(declared)
    repl.keras_model(model)
    expected, plans, counts = _of_sequences(declared)[0], set(), []
    expected.set_weights(model.get_weights())
    for k in range(20):
        x = numbers(k, 1 + 7 * k % 20, 1 + 3 * k % 20, 3)
        given = [x] if name == "predict" else [x, x]
        actual = getattr(model, f"{name}_on_batch")(*given)
        wanted_now = getattr(expected, f"{name}_on_batch")(*given)
        np.testing.assert_allclose(actual, wanted_now, rtol=1e-4, atol=1e-5)
        counts.append(len(noted))  # the first: with what Keras needs to build it
        plans.add(id(repl.plan))
    assert counts[-1] - counts[0] == wanted - 1 and noted[-1][1] is None
    assert len(plans) <= 2 * wanted  # of few rows, which are not split, and of others


def test_lengths_of_data_sets_are_traced_once() -> None:
    repl = helpers.make(2)
    with repl.context():
        model, noted = _of_sequences(declared=False)
    repl.keras_model(model)
    parts = [numbers(k, k, 3) for k in range(1, 9)]
    data = tf.data.Dataset.from_generator(
        lambda: ((part, part) for part in parts),
        output_signature=(tf.TensorSpec([None, 3]),) * 2,
    )
    noted.clear()
    model.fit(data.padded_batch(2), epochs=2, verbose=0)
    assert set(noted) == {(None, None, 3)} and len(noted) <= 2  # Keras builds it, too


def test_what_is_inside_is_found_once() -> None:
    model = Inner()
    model.more = {"again": [model.dense], "inner": Outer()}
    actual = list(state.inside(model))
    assert model.size in actual and model.dense in actual
    assert len({id(one) for one in actual}) == len(actual)
    assert model.more["inner"] not in actual
