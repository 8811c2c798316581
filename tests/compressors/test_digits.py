# SPDX-License-Identifier: Apache-2.0
"""A network on real digits learns as well with compressed gradients as without."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from tests import helpers

EPOCHS, BATCH, SEEDS = 20, 64, (1, 2)
POINTS = 0.5  # percent; an image in 360 of each seed is 0.14 of them


def make_model() -> tf.keras.Model:
    """Returns the model of examples/digits.py."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def train(compressor: Any, seed: int) -> float:
    """Returns the test accuracy, in percent."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype("f")
    x, test_x, y, test_y = train_test_split(
        images, digits.target, test_size=0.2, stratify=digits.target, random_state=0
    )
    repl = helpers.make(2)
    tf.keras.utils.set_random_seed(seed)
    with repl.context():
        model = make_model()
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.Adam(1e-3), compressor=compressor
        )
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step_fn(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(images, training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed)
    data = data.batch(BATCH // 2, drop_remainder=True).repeat()
    steps = len(x) // BATCH
    for _ in range(EPOCHS):
        repl.run(step_fn, data, steps_per_call=steps)
    helpers.assert_replicas_equal(model.trainable_variables)
    predicted = tf.argmax(model(test_x, training=False), -1)
    return 100 * float(np.mean(predicted == test_y))


@functools.cache
def accuracy(compressor: Any) -> float:
    """Returns the mean over all seeds."""
    return float(np.mean([train(compressor, seed) for seed in SEEDS]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "compressor",
    [
        *("bf16", "fp16", "int8", "ef(bf16)", "ef(fp16)", "ef(int8)"),
        *("ef(topk(ratio=0.05))", "ef(powersgd(rank=4))"),
    ],
)
def test_digits_are_told_as_well_as_without(compressor: str) -> None:
    exact, compressed = accuracy(None), accuracy(compressor)
    assert exact > 98
    assert abs(compressed - exact) <= POINTS, (compressed, exact)
