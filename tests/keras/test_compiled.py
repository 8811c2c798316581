# SPDX-License-Identifier: Apache-2.0
"""jit_compile=True: the same results, without XLA."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tests import helpers
from tests.keras import worlds
from tests.keras.worlds import World, check, classifier, labels, numbers

layers = keras.layers
X, Y = numbers(0, 17, 8), labels(0, 17)
FIT: dict[str, Any] = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}


def _program(world: World, make: Any, x: Any = X, y: Any = Y) -> Any:
    model = world.made(make)
    history = model.fit(x, y, **FIT).history
    return history, model.predict(x, verbose=0)


@pytest.mark.slow
def test_compiled_models() -> None:
    check(lambda world: _program(world, lambda: classifier(jit_compile=True)), [2])


@pytest.mark.slow
def test_masks_leave_what_is_compiled() -> None:
    x = np.array([[1 + k if k < 1 + i % 5 else 0 for k in range(5)] for i in range(17)])
    y = labels(2, 17 * 5, 4).reshape(17, 5)

    def make() -> keras.Model:
        dense = layers.Dense(4, activation="softmax")
        embedding = layers.Embedding(7, 4, mask_zero=True)
        model = keras.Sequential([layers.Input((5,)), embedding, dense])
        model.compile("sgd", worlds.SPARSE, jit_compile=True)
        return model

    check(lambda world: _program(world, make, x, y), [2])


class Unbuilt(keras.Model):
    """Creates its variables at its first call, with inputs that are a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = layers.Embedding(4, 5), layers.Dense(3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.dense(inputs["x"] + tf.reduce_sum(self.embedding(inputs["k"]), 1))


@pytest.mark.parametrize("kind", ["own", pytest.param("plain", marks=pytest.mark.slow)])
def test_models_are_built_by_fit(kind: str) -> None:
    def make() -> keras.Model:
        model = keras.Sequential([layers.Dense(3)]) if kind == "plain" else Unbuilt()
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        return model

    x = {"x": X[:, :5], "k": np.arange(34).reshape(17, 2) % 4}
    y = numbers(1, 17, 3)

    inputs = X if kind == "plain" else x
    check(lambda world: _program(world, make, inputs, y), [2])


class Added(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(tf.reduce_mean(x))
        return x


class Callless(keras.Model):
    """Has a step, and no call that could build it."""

    def train_step(self, data: Any) -> Any:
        return {"loss": tf.reduce_mean(data[0])}


def _normalizing() -> keras.Model:
    """Returns a model whose moving statistics are written during its call."""
    return keras.Sequential(
        [layers.Input((8,)), layers.BatchNormalization(), layers.Dense(3)]
    )


def _adding() -> keras.Model:
    return keras.Sequential([layers.Input((8,)), Added(), layers.Dense(3)])


@pytest.mark.parametrize(
    "make", [_adding, _normalizing, pytest.param(Callless, marks=pytest.mark.slow)]
)
def test_what_xla_could_not_compile(make: Any) -> None:
    def compiled() -> keras.Model:
        model = make()
        model.compile("sgd", "mse", jit_compile=world_is_plain is False)
        return model

    def program(world: World) -> Any:
        nonlocal world_is_plain
        world_is_plain = world.repl is None
        model = world.made(compiled)
        return model.fit(X, numbers(1, 17, 3), **FIT).history

    world_is_plain = True
    check(program, [2])


def test_there_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for Keras' own choice, "auto"."""
    told: list[Any] = []
    monkeypatch.setattr(logging, "log_first_n", lambda *given: told.append(given))
    world = World(helpers.make(2))
    model = world.made(lambda: classifier(jit_compile="auto"))
    model.make_train_function()
    assert not told
    with world.context():
        model.compile("sgd", worlds.SPARSE, jit_compile=True)
    model.predict(X, verbose=0)
    ((_, form, times, text),) = told
    assert times == 1
    assert re.search(
        r"(?s)runs without XLA.*test_compiled.py:\d+.*Fix: leave out jit_compile",
        form % text,
    )


@pytest.mark.parametrize(
    "rows", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 8))]
)
def test_a_model_may_be_compiled_by_xla_after_it_was_trained_without(rows: int) -> None:
    """Its owned variables get components; earlier traces are redone."""

    def program(world: World) -> Any:
        model = world.made(lambda: classifier())
        x, y = X[:rows], Y[:rows]
        fit = {"epochs": 1, "batch_size": 4, "shuffle": False, "verbose": 0}
        results = [model.fit(x, y, **fit).history, model.evaluate(x, y, verbose=0)]
        with world.context():
            model.compile("sgd", worlds.SPARSE, jit_compile=True)
        results += [model.fit(x, y, **fit).history, model.predict(x, verbose=0)]
        with world.context():
            model.compile("sgd", worlds.SPARSE)
        return [*results, model.fit(x, y, **fit).history]

    check(program, [3], variables="sharded")
