# SPDX-License-Identifier: Apache-2.0
"""The networks as Keras models, and the training step of all contenders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import networks

Batch = tuple[Any, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A network with its training settings.

    Attributes:
        name: The name in flags and files.
        title: The name in tables.
        network: The sizes; makes the examples.
        make: Returns a new Keras model of the network: examples to logits.
        batch: Examples per step, over all replicas.
        steps: How many steps of each contender are measured by default.
        momentum: The momentum of the SGD optimizer.
        adam: Whether the optimizer is Adam instead.
        batch_norm: Whether the model uses batch normalization: replicas then normalize
            by their own examples, so their losses differ from one device's.
        compiled: Whether XLA compiles the forward and the backward pass.
    """

    name: str
    title: str
    network: Any
    make: Callable[[Any], tf.keras.Model]
    batch: int
    steps: int
    momentum: float = networks.MOMENTUM
    adam: bool = False
    batch_norm: bool = False
    compiled: bool = False

    def make_model(self) -> tf.keras.Model:
        """Returns a new model with new weights."""
        return self.make(self.network)

    def parts(self, replicas: int) -> list[networks.Batch]:
        """Returns the batch, cut into one part per replica."""
        batch = self.network.batch(self.batch)
        cut = [np.array_split(leaf, replicas) for leaf in tf.nest.flatten(batch)]
        return [
            tf.nest.pack_sequence_as(batch, part) for part in zip(*cut, strict=True)
        ]


def mlp(network: networks.Perceptron) -> tf.keras.Model:
    """Returns a perceptron."""
    hidden = [
        tf.keras.layers.Dense(size, "relu", kernel_initializer="he_normal")
        for size in network.sizes[1:-1]
    ]
    logits = tf.keras.layers.Dense(network.sizes[-1])
    return tf.keras.Sequential(
        [tf.keras.layers.Input((network.inputs,)), *hidden, logits]
    )


def resnet(network: networks.ResNet) -> tf.keras.Model:
    """Returns a residual network.

    The shortcut between stages is a 1x1 convolution.
    """
    images = tf.keras.layers.Input(network.image)
    x = _convolution(images, network.filters[0], 3, 1, relu=True)
    for stage, filters in enumerate(network.filters):
        for block in range(network.n):
            stride = 2 if stage and not block else 1
            shortcut = _convolution(x, filters, 1, stride) if stride > 1 else x
            y = _convolution(x, filters, 3, stride, relu=True)
            y = _convolution(y, filters, 3, 1)
            x = tf.keras.layers.ReLU()(tf.keras.layers.Add()([shortcut, y]))
    x = tf.keras.layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(images, tf.keras.layers.Dense(networks.CLASSES)(x))


def _convolution(
    x: tf.Tensor, filters: int, size: int, stride: int, relu: bool = False
) -> tf.Tensor:
    """Applies a convolution, batch normalization and optionally the nonlinearity."""
    x = tf.keras.layers.Conv2D(filters, size, stride, "same", use_bias=False)(x)
    x = tf.keras.layers.BatchNormalization()(x)
    return tf.keras.layers.ReLU()(x) if relu else x


def language_model(network: networks.LanguageModel) -> tf.keras.Model:
    """Returns a model of text: characters [batch, length] to logits of the next."""
    layers = tf.keras.layers
    lstm = [
        layers.LSTM(network.units, return_sequences=True) for _ in range(network.layers)
    ]
    return tf.keras.Sequential(
        [
            layers.Input((network.length,), dtype="int32"),
            layers.Embedding(network.characters, network.units),
            *lstm,
            layers.Dense(network.characters),
        ]
    )


class Rows(tf.keras.layers.Layer):
    """Looks up rows of a variable.

    tf.keras.layers.Embedding and tf.nn.embedding_lookup read the whole variable: the
    former always, the latter if the variable is a distributed one. Once something
    scatters to it, TensorFlow copies it at each such read.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self._shape = (rows, columns)

    def build(self, input_shape: Any) -> None:
        """Makes the variable."""
        del input_shape
        self._rows = self.add_weight(shape=self._shape, initializer="uniform")

    def call(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns rows [..., columns], given their numbers [...]."""
        return tf.gather(self._rows.value, numbers)


def wide_and_deep(network: networks.WideAndDeep) -> tf.keras.Model:
    """Returns a wide and deep model of two classes."""
    layers = tf.keras.layers
    numbers = layers.Input((network.features,), dtype="int32")
    values = layers.Input((network.values,))
    embedded = Rows(network.rows, network.columns)(numbers)
    x = layers.Concatenate()([layers.Flatten()(embedded), values])
    for size in network.hidden:
        x = layers.Dense(size, "relu")(x)
    deep = layers.Dense(2)(x)
    weights = Rows(network.rows, 1)(numbers)
    wide = layers.Dense(2)(layers.Concatenate()([layers.Flatten()(weights), values]))
    return tf.keras.Model([numbers, values], layers.Add()([deep, wide]))


def embedding(network: networks.WideAndDeep) -> tf.keras.Model:
    """Returns a model of two classes that is almost nothing but an embedding."""
    layers = tf.keras.layers
    numbers = layers.Input((network.features,), dtype="int32")
    values = layers.Input((network.values,))
    embedded = Rows(network.rows, network.columns)(numbers)
    x = layers.Concatenate()([layers.Flatten()(embedded), values])
    return tf.keras.Model([numbers, values], layers.Dense(2)(x))


WORKLOADS = (
    Workload("small", "32-64-64-10 MLP", networks.SMALL, mlp, 128, 2000),
    Workload("large", "1024-2048x3-10 MLP", networks.LARGE, mlp, 128, 60),
    Workload("deep", "100-layer MLP", networks.DEEP, mlp, 128, 400),
    Workload(
        "resnet20",
        "Keras ResNet-20",
        networks.RESNET20,
        resnet,
        batch=64,
        steps=40,
        batch_norm=True,
    ),
    Workload(
        "lstm",
        "LSTM language model",
        networks.LANGUAGE,
        language_model,
        batch=64,
        steps=40,
    ),
    Workload(
        "wide",
        "wide and deep, 1,000,000 x 64",
        networks.CLICKS,
        wide_and_deep,
        batch=256,
        steps=40,
        momentum=0.0,  # momentum would update all rows, not only the step's
    ),
)
# Adam updates all of its rows in each step.
EMBEDDING = Workload(
    "embedding",
    "1,000,000 x 64 embedding with Adam",
    networks.CLICKS,
    embedding,
    batch=256,
    steps=60,
    adam=True,
)


def make_optimizer(
    workload: Workload, model: tf.keras.Model
) -> tf.keras.optimizers.Optimizer:
    """Returns the optimizer of a workload, with its slots created."""
    if workload.adam:
        optimizer = tf.keras.optimizers.Adam(networks.LEARNING_RATE)
    else:
        optimizer = tf.keras.optimizers.SGD(
            networks.LEARNING_RATE, momentum=workload.momentum
        )
    optimizer.build(model.trainable_variables)
    return optimizer


def train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    batch: Batch,
    loss_scale: float = 1.0,
    compiled: bool = False,
) -> tf.Tensor:
    """Takes one training step, written for one device.

    Args:
        model: The model to train.
        optimizer: The model's optimizer.
        batch: Examples and labels.
        loss_scale: The factor of the differentiated loss; a contender that sums the
            gradients of R replicas needs 1 / R to get their mean.
        compiled: Whether XLA compiles the forward and the backward pass.

    Returns:
        The mean loss over the batch before the update, a scalar.
    """
    variables = model.trainable_variables

    def differentiated(examples: Any, labels: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            logits = model(examples, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            )
            scaled = loss if loss_scale == 1.0 else loss * loss_scale
        return loss, tape.gradient(scaled, variables)

    if compiled:
        differentiated = tf.function(differentiated, jit_compile=True, autograph=False)
    loss, gradients = differentiated(*batch)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return loss
