"""What is trained: four workloads, and the one step that every contender takes.

The three multi-layer perceptrons are those of DESIGN.md, section 6. Each stresses
something else: the small one the cost of a step that computes next to nothing, the
large one memory traffic (10 million parameters), the deep one the number of ops and of
variables. The residual network adds convolutions and batch normalization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

NUM_CLASSES = 10
LEARNING_RATE = 1e-3
MOMENTUM = 0.9

Batch = tuple[tf.Tensor, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Workload:
    """One thing to train.

    Attributes:
        name: For tables and flags.
        make_model: Returns a new Keras model: images or features to logits.
        input_shape: Of one example.
        per_replica_batch: Examples per replica and step.
        steps: How many steps of each contender are measured by default.
        batch_norm: Whether the model normalizes by batch: replicas then normalize by
            their own examples, so their losses are not those of one device.
    """

    name: str
    make_model: Callable[[], tf.keras.Model]
    input_shape: tuple[int, ...]
    per_replica_batch: int
    steps: int
    batch_norm: bool = False

    def batches(self, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns `count` batches of random examples, the same in each call.

        Each is (float32 [per_replica_batch, *input_shape], int32 [per_replica_batch]).
        """
        rng = np.random.default_rng(0)
        size = self.per_replica_batch
        return [
            (
                rng.standard_normal((size, *self.input_shape), np.float32),
                rng.integers(0, NUM_CLASSES, size, np.int32),
            )
            for _ in range(count)
        ]


def mlp(inputs: int, hidden: int, layers: int) -> tf.keras.Model:
    """Returns a perceptron with `layers` hidden layers of `hidden` units."""
    dense = [
        tf.keras.layers.Dense(hidden, "relu", kernel_initializer="he_normal")
        for _ in range(layers)
    ]
    return tf.keras.Sequential(
        [tf.keras.layers.Input((inputs,)), *dense, tf.keras.layers.Dense(NUM_CLASSES)]
    )


def resnet20() -> tf.keras.Model:
    """Returns the 20-layer residual network for 32x32 images.

    Source: He et al. 2015, arXiv:1512.03385, section 4.2; n = 3. The shortcut between
    stages is a 1x1 convolution.
    """
    images = tf.keras.layers.Input((32, 32, 3))
    x = _convolution(images, 16, 3, 1, relu=True)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage and not block else 1
            shortcut = _convolution(x, filters, 1, stride) if stride > 1 else x
            y = _convolution(x, filters, 3, stride, relu=True)
            y = _convolution(y, filters, 3, 1)
            x = tf.keras.layers.ReLU()(tf.keras.layers.Add()([shortcut, y]))
    x = tf.keras.layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(images, tf.keras.layers.Dense(NUM_CLASSES)(x))


def _convolution(
    x: tf.Tensor, filters: int, size: int, stride: int, relu: bool = False
) -> tf.Tensor:
    """Applies a convolution and batch normalization, and the nonlinearity if asked."""
    x = tf.keras.layers.Conv2D(filters, size, stride, "same", use_bias=False)(x)
    x = tf.keras.layers.BatchNormalization()(x)
    return tf.keras.layers.ReLU()(x) if relu else x


WORKLOADS = (
    Workload("small", lambda: mlp(32, 64, 2), (32,), 64, steps=2000),
    Workload("large", lambda: mlp(1024, 2048, 3), (1024,), 64, steps=60),
    Workload("deep", lambda: mlp(64, 64, 100), (64,), 64, steps=400),
    Workload("resnet20", resnet20, (32, 32, 3), 32, steps=30, batch_norm=True),
)


def make_optimizer(model: tf.keras.Model) -> tf.keras.optimizers.Optimizer:
    """Returns the optimizer of all workloads, SGD with momentum, its slots created."""
    optimizer = tf.keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
    optimizer.build(model.trainable_variables)
    return optimizer


def train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    batch: Batch,
    loss_scale: float = 1.0,
) -> tf.Tensor:
    """Takes one training step, written for one device.

    Args:
        model: What is trained.
        optimizer: Updates it.
        batch: Examples and labels.
        loss_scale: What the differentiated loss is multiplied by; a contender that sums
            the gradients of R replicas needs 1 / R to get their mean.

    Returns:
        The mean loss over the batch before the update, a scalar.
    """
    examples, labels = batch
    with tf.GradientTape() as tape:
        logits = model(examples, training=True)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        )
        scaled = loss if loss_scale == 1.0 else loss * loss_scale
    variables = model.trainable_variables
    optimizer.apply_gradients(
        zip(tape.gradient(scaled, variables), variables, strict=True)
    )
    return loss
