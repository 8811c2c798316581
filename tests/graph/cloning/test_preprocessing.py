# SPDX-License-Identifier: Apache-2.0
"""Keras' preprocessing layers in copied steps compute what they compute alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import replicator
from tests import helpers

NUMBERS = np.random.default_rng(0).normal(2.0, 3.0, [12, 4]).astype(np.float32)
COUNTS = np.arange(12).reshape(12, 1) % 5
TEXTS = np.array([["a"], ["b"], ["c"], ["d"]] * 3)


def _adapted(name: str, values: Any, layers: Any, **options: Any) -> Any:
    layer = getattr(layers, name)(**options)
    layer.adapt(values)
    return layer


def _made(name: str, layers: Any, **options: Any) -> Any:
    return getattr(layers, name)(**options)


LAYERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "adapted": (functools.partial(_adapted, "Normalization", NUMBERS), NUMBERS),
    "constants": (
        functools.partial(
            _made, "Normalization", mean=[1.0, 2, 3, 4], variance=[4.0, 4, 9, 1]
        ),
        NUMBERS,
    ),
    "quantiles": (
        functools.partial(_adapted, "Discretization", NUMBERS, num_bins=4),
        NUMBERS,
    ),
    "bins": (
        functools.partial(_made, "Discretization", bin_boundaries=[0.0, 1.0]),
        NUMBERS,
    ),
    "vocabulary": (
        functools.partial(_adapted, "StringLookup", TEXTS, output_mode="tf_idf"),
        TEXTS,
    ),
    "words": (functools.partial(_made, "StringLookup", vocabulary=["a", "c"]), TEXTS),
    "integers": (functools.partial(_adapted, "IntegerLookup", COUNTS), COUNTS),
    "categories": (
        functools.partial(_made, "CategoryEncoding", num_tokens=5),
        COUNTS,
    ),
    "hashes": (functools.partial(_made, "Hashing", num_bins=7), TEXTS),
    "scaled": (functools.partial(_made, "Rescaling", scale=0.1, offset=1.0), NUMBERS),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("where", ["step", "inputs"])
@pytest.mark.parametrize("package", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_they_compute_alone(
    name: str, package: Any, where: str
) -> None:
    make, values = LAYERS[name]
    if (name, where) == ("constants", "inputs"):  # Keras keeps a tensor of one trace
        values, make = values, lambda layers: _built(LAYERS[name][0](layers))
    layer = make(package.layers)
    expected = [np.asarray(make(package.layers)(part)) for part in np.split(values, 3)]
    repl = helpers.make(3, build="clone")

    def input_fn(context: replicator.InputContext) -> tf.data.Dataset:
        part = np.split(values, 3)[context.replica_id]
        data = tf.data.Dataset.from_tensors(part)
        return data.map(layer) if where == "inputs" else data

    step_fn = tf.identity if where == "inputs" else layer
    for one, two in zip(
        expected, repl.run(lambda x: step_fn(x), input_fn), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-6)


def _built(layer: Any) -> Any:
    layer(NUMBERS)
    return layer


@pytest.mark.parametrize("build", ["trace", "clone"])
def test_a_layer_that_keeps_tensors_of_its_first_call(build: Any) -> None:
    """Keras 3 reads mean and variance in `build` only, which clones call once."""
    repl = helpers.make(3, build=build)
    with repl.context():
        layer = keras.layers.Normalization()

    def run() -> Any:
        return repl.run(lambda x: layer(x), lambda context: tf.constant(NUMBERS[:4]))

    if build == "trace":
        with pytest.raises(
            replicator.ReplicatorError, match=r"(?s)test_preprocessing.*Fix: .* layer "
        ) as caught:
            run()
        assert "before the step" in str(caught.value)
        with repl.context():
            layer = keras.layers.Normalization()
            layer.build((None, 4))
    for value in run():
        np.testing.assert_array_equal(value, NUMBERS[:4])
