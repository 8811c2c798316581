# SPDX-License-Identifier: Apache-2.0
"""Programs with Keras' fit, run by Keras alone and on replicas, and their results."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests import helpers

layers = keras.layers


@dataclasses.dataclass
class World:
    """The environment of a program.

    Attributes:
        repl: Its Replicator; None for Keras alone.
    """

    repl: Any = None

    def context(self) -> Any:
        """The context in which models are made."""
        return self.repl.context() if self.repl else contextlib.nullcontext()

    def made(self, make: Callable[[], keras.Model]) -> Any:
        """Returns a model of this world, with the same weights as in any other."""
        keras.utils.set_random_seed(7)
        with self.context():
            model = make()
        return self.repl.keras_model(model) if self.repl else model


Program = Callable[[World], Any]


def outcome(program: Program, num_replicas: int, **options: Any) -> Any:
    """Runs a program, with 0 replicas by Keras alone; returns its results as arrays."""
    keras.backend.clear_session()
    repl = helpers.make(num_replicas, **options) if num_replicas else None
    return tf.nest.map_structure(_array, program(World(repl)))


def _array(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        leaf = leaf.to_tensor()
    return np.asarray(leaf)


def check(
    program: Program,
    replicas: Any = (1, 2, 3),
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    """Asserts that a program gives the same results on replicas as without them."""
    expected = outcome(program, 0)
    for num_replicas in replicas:
        actual = outcome(program, num_replicas, **options)
        tf.nest.assert_same_structure(actual, expected)
        pairs = zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True)
        for k, (own, plain) in enumerate(pairs):
            np.testing.assert_allclose(
                own,
                plain,
                rtol=tolerance,
                atol=tolerance,
                err_msg=f"value {k} on {num_replicas} replicas",
            )


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Returns random inputs."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def labels(seed: int, size: int, classes: int = 3) -> np.ndarray:
    """Returns random classes."""
    return np.random.default_rng(seed).integers(0, classes, size=size)


def mlp(outputs: int = 3, **dense: Any) -> keras.Model:
    """Returns a small network that is not compiled."""
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16, activation="relu", **dense),
            layers.Dense(outputs),
        ]
    )


SPARSE = "sparse_categorical_crossentropy"


def classifier(**options: Any) -> keras.Model:
    """Returns a small network, compiled."""
    model = keras.Sequential([mlp(), layers.Softmax()])
    defaults: dict[str, Any] = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": SPARSE,
        "metrics": ["accuracy"],
    }
    model.compile(**(defaults | options))
    return model
