# SPDX-License-Identifier: Apache-2.0
"""Batch normalization over all replicas that stays accurate when the mean is large.

    python examples/global_batch_norm.py --devices=CPU:0,CPU:1,CPU:2 --offset=1e4

The usual way to normalize by the batch of all replicas sums x and x^2 and takes
E[x^2] - E[x]^2. Where the mean is 10,000 times the deviation, float32 has no digit left
for that difference. `GlobalBatchNorm` instead merges the statistics of the replicas'
shards: the number of values, their mean, and the sum of their squared deviations from
it. Shards may be uneven, and empty.

The program shifts scikit-learn's digits that far from zero, and trains one network with
each of the two. It prints how far either is from batch normalization of the whole batch
in float64, and the accuracy of the networks on unseen digits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import support  # before TensorFlow, whose environment it sets

import numpy as np
import tensorflow as tf
from absl import flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import replicator

FLAGS = flags.FLAGS
support.define_flags(epochs=5)  # and --devices, --seed
support.define_count(
    "global_batch_size", 64, "Images per step, on all replicas together."
)
support.define_positive("learning_rate", 3e-3, "Adam's learning rate.")
flags.DEFINE_float("offset", 1e4, "The mean of the pixels, in standard deviations.")
flags.register_validator("offset", math.isfinite, "must be a finite number")

EPSILON = 1e-3  # added to variances, Keras' default


# --- The recipe ----------------------------------------------------------------------


class GlobalBatchNorm(tf.keras.layers.Layer):
    """Normalizes each channel by its mean and variance over all replicas.

    Replaces `tf.keras.layers.BatchNormalization(synchronized=True)`, for inputs [...,
    channels]. Must be created under `repl.context()` and called in a step.

    Args:
        repl: The Replicator.
        momentum: The decay of the moving statistics.
        epsilon: Added to the variance.
    """

    def __init__(
        self,
        repl: replicator.Replicator,
        momentum: float = 0.9,
        epsilon: float = EPSILON,
    ) -> None:
        super().__init__()
        self._repl = repl
        self.momentum = momentum
        self.epsilon = epsilon

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Creates the variables, one value per channel."""
        shape = (input_shape[-1],)
        self.gamma = self.add_weight(shape=shape, initializer="ones")
        self.beta = self.add_weight(shape=shape, initializer="zeros")
        self.moving_mean = self.add_weight(
            shape=shape, initializer="zeros", trainable=False
        )
        self.moving_variance = self.add_weight(
            shape=shape, initializer="ones", trainable=False
        )

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Returns the normalized inputs, in their shape."""
        if training:
            center, mean, variance = global_moments(self._repl, inputs)
            for moving, value in (
                (self.moving_mean, center + mean),
                (self.moving_variance, variance),
            ):
                moving.assign(value + self.momentum * (moving - value))
        else:
            center, mean = self.moving_mean, 0.0
            variance = self.moving_variance
        # Not inputs - (center + mean): that sum would be rounded to 7 digits.
        deviations = (inputs - center) - mean
        scale = self.gamma * tf.math.rsqrt(variance + self.epsilon)
        return deviations * scale + self.beta


def global_moments(
    repl: replicator.Replicator, inputs: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns mean and variance of each channel over the inputs of all replicas.

    Each replica computes its statistics around its own mean; all replicas merge them
    (`merge`) after one all_gather. No large number is squared.

    Args:
        repl: The Replicator.
        inputs: This replica's shard, [..., channels]; it may be empty.

    Returns:
        A center, [channels], near the mean, and a constant for gradients; the mean
        relative to it; the variance. The center holds the digits that the mean alone
        would have to round away.
    """
    axes = list(range(inputs.shape.rank - 1))
    count = tf.cast(tf.reduce_prod(tf.shape(inputs)[:-1]), inputs.dtype)

    def average(values: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(tf.reduce_sum(values, axes), count)

    own_center = tf.stop_gradient(average(inputs))
    own_mean = average(inputs - own_center)  # the remaining rounding error: almost zero
    own_squares = tf.reduce_sum((inputs - own_center - own_mean) ** 2, axes)
    counts, centers, means, squares = repl.all_gather(
        (count, own_center, own_mean, own_squares)
    )
    shares = tf.math.divide_no_nan(counts, tf.reduce_sum(counts))
    center = tf.linalg.matvec(centers, shares, transpose_a=True)
    mean, total = merge(counts, (centers - center) + means, squares)
    return center, mean, tf.math.divide_no_nan(total, tf.reduce_sum(counts))


def merge(
    counts: tf.Tensor, means: tf.Tensor, squares: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and the sum of squared deviations of a union of sets.

    Source: Chan, Golub, LeVeque 1979, Updating formulae and a pairwise algorithm for
    computing sample variances, equation 2.1 for more than two sets.

    Args:
        counts: [sets], the number of values in each; zero if it is empty.
        means: [sets, channels], their means; anything finite for an empty set.
        squares: [sets, channels], their sums of squared deviations from these.

    Returns:
        Both [channels].
    """
    counts = counts[:, tf.newaxis]
    shares = tf.math.divide_no_nan(counts, tf.reduce_sum(counts))
    mean = tf.reduce_sum(shares * means, 0)
    return mean, tf.reduce_sum(squares + counts * (means - mean) ** 2, 0)


# --- Error measurement ---------------------------------------------------------------


def layers(
    repl: replicator.Replicator,
) -> dict[str, Callable[[], tf.keras.layers.Layer]]:
    """Returns the two kinds of layers, by name."""
    return {
        "merged": lambda: GlobalBatchNorm(repl),
        # Asks tf.distribute for the replicas; in a step, Replicator answers.
        "naive": lambda: tf.keras.layers.BatchNormalization(
            momentum=0.9, epsilon=EPSILON, synchronized=True
        ),
    }


def on_replicas(
    repl: replicator.Replicator,
    layer: tf.keras.layers.Layer,
    shards: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the layer's outputs for the whole batch, and its gradients.

    Args:
        repl: The Replicator.
        layer: A layer for training.
        shards: `shards[r]` is replica r's part of the batch, [n_r, channels].
        weights: In the same shapes. The differentiated value is the sum of all outputs,
            each times its weight.
    """

    def shard(ctx: replicator.InputContext) -> tf.data.Dataset:
        arrays = shards[ctx.pipeline_id], weights[ctx.pipeline_id]
        return tf.data.Dataset.from_tensors(arrays)

    def step(batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        inputs, weight = batch
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True)
            loss = tf.reduce_sum(outputs * weight)
        return outputs, tape.gradient(loss, inputs)

    outputs, gradients = repl.run(step, shard)
    return np.concatenate(outputs), np.concatenate(gradients)


def in_float64(
    inputs: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the same in float64, by the definition: a batch on one device."""
    x, w = inputs.astype(np.float64), weights.astype(np.float64)
    deviations = x - x.mean(0)
    scale = 1 / np.sqrt(x.var(0) + EPSILON)
    outputs = deviations * scale
    gradients = scale * (w - w.mean(0) - outputs * (outputs * w).mean(0))
    return outputs, gradients


def errors_of(
    repl: replicator.Replicator, layer: tf.keras.layers.Layer, inputs: np.ndarray
) -> tuple[float, float]:
    """Returns the largest errors of outputs and gradients for one batch."""
    weights = np.random.default_rng(0).normal(size=inputs.shape).astype(np.float32)
    parts = [np.array_split(a, repl.num_replicas) for a in (inputs, weights)]
    actual = on_replicas(repl, layer, *parts)
    expected = in_float64(inputs, weights)
    outputs, gradients = (
        float(np.max(np.abs(f - e))) for f, e in zip(actual, expected, strict=True)
    )
    return outputs, gradients


# --- Training ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Examples:
    """Pixels, float32 [n, 64], and their digits, int64 [n]."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def load_examples(offset: float) -> tuple[Examples, Examples]:
    """Returns training and test examples of deviation 1 and mean `offset`."""
    digits = load_digits()
    pixels, labels = digits.data, digits.target.astype(np.int64)
    pixels = (pixels - pixels.mean()) / pixels.std() + offset
    train_pixels, test_pixels, train_labels, test_labels = train_test_split(
        pixels.astype(np.float32),
        labels,
        test_size=0.2,
        stratify=labels,
        random_state=0,
    )
    return Examples(train_pixels, train_labels), Examples(test_pixels, test_labels)


def training_input(
    examples: Examples, epochs: int, batch_size: int, seed: int
) -> Callable[[replicator.InputContext], tf.data.Dataset]:
    """Returns the input_fn: each epoch in batches, the last of which is smaller.

    Its images are dealt to the replicas, some of which get fewer, or none.
    """

    def batches(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(len(examples)), seed=[seed, epoch]
        )
        return tf.data.Dataset.from_tensor_slices(order).batch(batch_size)

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        def own(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            index = index[ctx.pipeline_id :: ctx.num_pipelines]
            return tf.gather(examples.pixels, index), tf.gather(examples.labels, index)

        return tf.data.Dataset.range(epochs).flat_map(batches).map(own)

    return input_fn


def train(
    repl: replicator.Replicator,
    make_layer: Callable[[], tf.keras.layers.Layer],
    examples: Examples,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> tf.keras.Model:
    """Returns a trained network with these layers."""
    tf.keras.utils.set_random_seed(seed)
    with repl.context():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((examples.pixels.shape[-1],)),
                make_layer(),
                tf.keras.layers.Dense(64, activation="relu"),
                make_layer(),
                tf.keras.layers.Dense(10),
            ]
        )
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.Adam(learning_rate), op="sum"
        )
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum"
    )

    def step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        pixels, labels = batch
        count = tf.cast(repl.all_reduce(tf.size(labels)), tf.float32)
        with tf.GradientTape() as tape:
            # The sum over all replicas is the mean over the batch; gradients that
            # cross replicas are gradients of that sum.
            loss = loss_fn(labels, model(pixels, training=True)) / count
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    train_step = repl.build(step, training_input(examples, epochs, batch_size, seed))
    for _ in range(epochs * math.ceil(len(examples) / batch_size)):
        train_step()
    return model


def accuracy(model: tf.keras.Model, examples: Examples) -> float:
    """Returns a network's accuracy on the examples."""
    logits = model(examples.pixels, training=False)
    return float(np.mean(np.argmax(logits, axis=-1) == examples.labels))


# --- The program ---------------------------------------------------------------------


def main() -> None:
    """Compares the two as the flags say."""
    repl = replicator.Replicator(FLAGS.devices)
    train_examples, test_examples = load_examples(FLAGS.offset)
    support.check_batch_size(
        "global_batch_size", repl.num_replicas, len(train_examples.pixels)
    )
    print(f"{'':8}{'output error':>14}{'gradient error':>16}{'test accuracy':>15}")
    for name, make_layer in layers(repl).items():
        with repl.context():
            layer = make_layer()
        first = train_examples.pixels[: FLAGS.global_batch_size]
        outputs, gradients = errors_of(repl, layer, first)
        model = train(
            repl,
            make_layer,
            train_examples,
            FLAGS.epochs,
            FLAGS.global_batch_size,
            FLAGS.learning_rate,
            FLAGS.seed,
        )
        right = accuracy(model, test_examples)
        print(f"{name:8}{outputs:14.1e}{gradients:16.1e}{right:15.4f}", flush=True)


if __name__ == "__main__":
    support.start(main)
