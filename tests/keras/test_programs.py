# SPDX-License-Identifier: Apache-2.0
"""Programs like those on keras.io compute plain Keras' numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras.worlds import World, check, labels, numbers

layers = keras.layers
SIZE = 22  # examples: batches of 8, 8 and 6
FIT: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}


def _fit(world: World, make: Callable[[], Any], x: Any, y: Any = None) -> Any:
    model = world.made(make)
    data = tf.data.Dataset.from_tensor_slices(x if y is None else (x, y)).batch(8)
    history = model.fit(data.take(2), validation_data=data.skip(2), **FIT).history
    return history, model.predict(data, verbose=0)


def image_classification(world: World) -> Any:
    """Convolutions, after augmentation that is not random here."""

    def make() -> keras.Model:
        model = keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Rescaling(0.5),
                layers.RandomFlip("horizontal", seed=1),
                layers.RandomRotation((0.1, 0.1), seed=1),
                layers.Conv2D(4, 3, padding="same", activation="relu"),
                layers.BatchNormalization(synchronized=True),
                layers.MaxPooling2D(),
                layers.GlobalAveragePooling2D(),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
        return model

    x = numbers(0, SIZE, 8, 4, 1)
    return _fit(world, make, np.concatenate([x, x[:, :, ::-1]], 2), labels(1, SIZE))


def _momentum() -> keras.Optimizer:
    """Returns an optimizer for embeddings, linear in the gradients."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


TEXTS = [" ".join(f"w{(i * k) % 9}" for k in range(1 + i % 5)) for i in range(SIZE)]


def text_classification(world: World) -> Any:
    """TextVectorization inside of the model."""

    def make() -> keras.Model:
        vectors = layers.TextVectorization(12, output_sequence_length=5)
        vectors.adapt(TEXTS)
        model = keras.Sequential(
            [
                keras.Input((), dtype="string"),
                vectors,
                layers.Embedding(12, 4),
                layers.GlobalAveragePooling1D(),
                layers.Dropout(0.0),
                layers.Dense(1, activation="sigmoid"),
            ]
        )
        metrics = [keras.metrics.BinaryAccuracy(), keras.metrics.AUC()]
        model.compile(_momentum(), "binary_crossentropy", metrics=metrics)
        return model

    return _fit(world, make, np.array(TEXTS), labels(1, SIZE, 2)[:, None])


WORDS = np.array([[1 + (i * k) % 8 for k in range(6)] for i in range(SIZE)])


def lstm(world: World) -> Any:
    def make() -> keras.Model:
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Embedding(9, 4),
                layers.Bidirectional(layers.LSTM(4)),
                layers.Dense(2, activation="softmax"),
            ]
        )
        loss = "sparse_categorical_crossentropy"
        model.compile(_momentum(), loss, metrics=["accuracy"])
        return model

    return _fit(world, make, WORDS, labels(1, SIZE, 2))


@keras.saving.register_keras_serializable()
class Block(layers.Layer):
    """A transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 2)
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.forward = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(4)])

    def call(self, x: Any) -> Any:
        x = self.norms[0](x + self.attention(x, x, use_causal_mask=True))
        return self.norms[1](x + self.forward(x))


def transformer(world: World) -> Any:
    """Predicts the next word."""

    def make() -> keras.Model:
        inputs = layers.Input((5,), dtype="int32")
        x = layers.Embedding(9, 4)(inputs)
        outputs = layers.Dense(9)(Block()(x))
        model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(_momentum(), loss)
        return model

    return _fit(world, make, WORDS[:, :-1], WORDS[:, 1:])


def _contrastive(y: Any, distance: Any) -> Any:
    margin = keras.ops.square(keras.ops.maximum(1 - distance, 0))
    return keras.ops.mean((1 - y) * keras.ops.square(distance) + y * margin)


def siamese(world: World) -> Any:
    """Two inputs, one network, and a custom loss."""

    def make() -> keras.Model:
        network = keras.Sequential([layers.Input((6,)), layers.Dense(4, "tanh")])
        a, b = layers.Input((6,)), layers.Input((6,))
        distance = layers.Lambda(
            lambda v: keras.ops.sqrt(
                keras.ops.sum((v[0] - v[1]) ** 2, axis=1, keepdims=True) + 1e-6
            )
        )([network(a), network(b)])
        model = keras.Model([a, b], distance)
        model.compile("sgd", _contrastive, metrics=["accuracy"])
        return model

    x = (numbers(0, SIZE, 6), numbers(1, SIZE, 6))
    y = labels(1, SIZE, 2)[:, None].astype("float32")
    return _fit(world, make, x, y)


class Autoencoder(keras.Model):
    """A variational one, with the train_step of keras.io; its noise is not random."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers.Dense(4), layers.Dense(6)
        self.total = keras.metrics.Mean(name="total_loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.kl]

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x)[:, :2])

    def losses_of(self, x: Any) -> Any:
        mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
        noise = tf.sin(99 * x[:, :2])
        decoded = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
        rebuilt = tf.reduce_mean(tf.reduce_sum((x - decoded) ** 2, 1))
        kl = 1 + log_variance - mean**2 - tf.exp(log_variance)
        return rebuilt, tf.reduce_mean(tf.reduce_sum(-0.5 * kl, axis=1))

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            rebuilt, kl = self.losses_of(x)
            total = rebuilt + kl
        grads = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        return self._counted(total, kl)

    def test_step(self, x: Any) -> Any:
        rebuilt, kl = self.losses_of(x)
        return self._counted(rebuilt + kl, kl)

    def _counted(self, total: Any, kl: Any) -> Any:
        self.total.update_state(total)
        self.kl.update_state(kl)
        return {"loss": self.total.result(), "kl_loss": self.kl.result()}


def vae(world: World) -> Any:
    def make() -> keras.Model:
        model = Autoencoder()
        model.compile(keras.optimizers.Adam(0.01))
        return model

    return _fit(world, make, numbers(0, SIZE, 6))


def tabular(world: World) -> Any:
    """Strings and numbers, looked up and normalized in the model."""
    kinds = np.array([["red", "green", "blue", "none"][i % 4] for i in range(SIZE)])
    ages = 30 + 9 * numbers(0, SIZE, 1)

    def make() -> keras.Model:
        lookup = layers.StringLookup(output_mode="one_hot")
        lookup.adapt(kinds[:, None])
        normal = layers.Normalization()
        normal.adapt(ages)
        kind = layers.Input((1,), dtype="string", name="kind")
        age = layers.Input((1,), name="age")
        x = layers.Concatenate()([lookup(kind), normal(age)])
        outputs = layers.Dense(1)(layers.Dense(4, "relu")(x))
        model = keras.Model({"kind": kind, "age": age}, outputs)
        model.compile("adam", "mse", metrics=["mae"])
        return model

    x = {"kind": kinds[:, None], "age": ages}
    return _fit(world, make, x, numbers(1, SIZE, 1))


def sequence_to_sequence(world: World) -> Any:
    """Encoder and decoder, with masks of different lengths."""
    x = np.where(np.arange(6) < 2 + np.arange(SIZE)[:, None] % 5, WORDS, 0)

    def make() -> keras.Model:
        source, target = layers.Input((6,)), layers.Input((6,))
        encoded = layers.Embedding(9, 4, mask_zero=True)(source)
        *_, h, c = layers.LSTM(4, return_state=True)(encoded)
        decoded = layers.Embedding(9, 4, mask_zero=True)(target)
        decoded = layers.LSTM(4, return_sequences=True)(decoded, initial_state=[h, c])
        outputs = layers.Dense(9, activation="softmax")(decoded)
        model = keras.Model([source, target], outputs)
        loss = "sparse_categorical_crossentropy"
        model.compile(_momentum(), loss, metrics=["accuracy"])
        return model

    shifted = np.concatenate([np.ones([SIZE, 1], int), x[:, :-1]], 1)
    return _fit(world, make, (x, shifted), x)


def segmentation(world: World) -> Any:
    """A class for each pixel, with a loss on the overlap of masks."""

    def make() -> keras.Model:
        inputs = layers.Input((8, 8, 1))
        down = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
        up = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(down)
        both = layers.Concatenate()([inputs, up])
        outputs = layers.Conv2D(2, 1, activation="softmax")(both)
        model = keras.Model(inputs, outputs)
        metrics = [keras.metrics.OneHotMeanIoU(2)]
        model.compile("adam", keras.losses.Dice(), metrics=metrics)
        return model

    x = numbers(0, SIZE, 8, 8, 1)
    y = np.concatenate([x > 0, x <= 0], -1).astype("float32")
    return _fit(world, make, x, y)


def mixed_precision(world: World) -> Any:
    """Computes in 16 bits, with a scaled loss."""

    def make() -> keras.Model:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            outputs = layers.Dense(1, dtype="float32")
            model = keras.Sequential([layers.Input((6,)), layers.Dense(8), outputs])
            optimizer = keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.125), initial_scale=256.0
            )
            model.compile(optimizer, "mse")
            return model
        finally:
            keras.config.set_dtype_policy("float32")

    return _fit(world, make, numbers(0, SIZE, 6), numbers(1, SIZE, 1))


PROGRAMS = [
    image_classification,
    text_classification,
    lstm,
    transformer,
    siamese,
    vae,
    tabular,
    sequence_to_sequence,
    segmentation,
]
# Programs in ways that no run of the suite may leave out.
_QUICK = ("vae-2", "tabular-3")
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"variables": "sharded"},
    {"build": "clone"},
    {},
    {"algorithm": "ring", "fusion": False},
)


def _cases() -> Iterator[Any]:
    """Yields programs with numbers of replicas, and with options in turn."""
    for k, program in enumerate(PROGRAMS):
        for replicas in (1, 2, 3):
            options = _OPTIONS[(k + replicas) % len(_OPTIONS)]
            name = f"{program.__name__}-{replicas}"
            marks = () if name in _QUICK else pytest.mark.slow
            yield pytest.param(program, replicas, options, id=name, marks=marks)


@pytest.mark.parametrize("program, replicas, options", list(_cases()))
def test_program(program: Any, replicas: int, options: dict[str, Any]) -> None:
    check(program, [replicas], **options)


@pytest.mark.slow
def test_mixed_precision() -> None:
    """Sums of other parts are rounded to 16 bits, an epsilon of 1e-3."""
    check(mixed_precision, [2, 3], tolerance=2e-3)


@pytest.mark.slow
def test_adam_takes_rows_that_repeat_as_on_one_device() -> None:
    """Keras' Adam squares each of them by itself."""

    def make() -> keras.Model:
        pooled = layers.GlobalAveragePooling1D()
        model = keras.Sequential(
            [layers.Input((6,)), layers.Embedding(9, 4), pooled, layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    y = numbers(1, SIZE, 1)
    check(lambda world: _fit(world, make, WORDS, y), [2, 3])
