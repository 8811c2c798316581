"""jit_compile=True: compiled by XLA, or refused by name."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicator.errors import ArgumentError
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


def test_the_forward_and_the_backward_pass_are_compiled() -> None:
    model = World(helpers.make(2)).made(lambda: classifier(jit_compile=True))
    compiled: list[bool] = []
    original = model.layers[0].call

    def call(*args: Any, **kwargs: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        compiled.append(graph.name.startswith("masked"))
        return original(*args, **kwargs)

    model.layers[0].call = call
    model.train_on_batch(X[:6], Y[:6])
    assert compiled == [True, True]


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


class Added(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(tf.reduce_mean(x))
        return x


@pytest.mark.parametrize(
    "make_layers, said",
    [
        (lambda: [layers.Input((8,)), Added(), layers.Dense(3)], "adds losses in its"),
        (lambda: [layers.Dense(3)], "is not built"),
    ],
)
def test_what_cannot_be_compiled_is_refused(make_layers: Any, said: str) -> None:
    def make() -> keras.Model:
        model = keras.Sequential(make_layers())
        model.compile("sgd", "mse", jit_compile=True)
        return model

    with pytest.raises(ArgumentError, match=f"(?s)jit_compile=True.*{said}.*Fix:"):
        worlds.outcome(lambda world: _program(world, make, y=numbers(1, 17, 3)), 2)
