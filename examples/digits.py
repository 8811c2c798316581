# SPDX-License-Identifier: Apache-2.0
"""Trains a small convolutional network on handwritten digits, on several replicas.

    python examples/digits.py --devices=CPU:0,CPU:1 --epochs=20

The data are the 1,797 images of scikit-learn's `load_digits`. The output folder gets

    checkpoints/  the last three, after each epoch: model, optimizer, step and history
    history.json  the loss of every step and the test accuracy after every epoch
    summaries/    the same for TensorBoard: tensorboard --logdir runs/digits
    curves.png    the same as a picture

Ctrl-C, SIGTERM and SIGHUP stop it after the current step and leave a checkpoint.
--resume continues from the newest readable checkpoint, and reaches the losses of an
uninterrupted run: the images of a step depend only on the seed and the step. It may
continue with more replicas or fewer; then the losses differ a little, since each
replica normalizes by its own images.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import support  # before TensorFlow, whose environment it sets

import numpy as np
import tensorflow as tf
from absl import flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import replicator

OPTIMIZERS: dict[str, Callable[[float], tf.keras.optimizers.Optimizer]] = {
    "adam": tf.keras.optimizers.Adam,
    "adamw": tf.keras.optimizers.AdamW,
    "lion": tf.keras.optimizers.Lion,
    "momentum": functools.partial(tf.keras.optimizers.SGD, momentum=0.9),
    "rmsprop": tf.keras.optimizers.RMSprop,
    "sgd": tf.keras.optimizers.SGD,
}
TEST_SHARE = 0.2  # of the images: 360

FLAGS = flags.FLAGS
support.define_flags("runs/digits", epochs=20)  # and --devices, --seed, --resume
support.define_count(
    "global_batch_size", 64, "Images per step, on all replicas together."
)
support.define_positive("learning_rate", 1e-3, "The optimizer's learning rate.")
flags.DEFINE_enum("optimizer", "adam", sorted(OPTIMIZERS), "Which optimizer to use.")


def load_examples() -> tuple[support.Examples, support.Examples]:
    """Returns the training and the test examples, stratified by digit."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=TEST_SHARE, stratify=labels, random_state=0
    )
    return support.Examples(train_images, train_labels), support.Examples(
        test_images, test_labels
    )


# --- The model and its two steps -----------------------------------------------------


def make_model() -> tf.keras.Model:
    """Returns a network from images [n, 8, 8, 1] to logits [n, 10]."""
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


def make_steps(
    repl: replicator.Replicator,
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the step_fns for training and for evaluation, over the same variables."""
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train_step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(images, training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return repl.all_reduce(loss, "mean")

    def eval_step(batch: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> Any:
        images, labels, weights = batch
        logits = model(images, training=False)
        correct = tf.cast(tf.argmax(logits, axis=-1) == labels, tf.float32)
        sums = tf.reduce_sum(weights * correct), tf.reduce_sum(weights)
        return repl.all_reduce(sums, "sum")

    return train_step, eval_step


# --- Training ------------------------------------------------------------------------


def evaluate(eval_step: Any, steps: int) -> float:
    """Returns the share of the test examples that the model gets right."""
    eval_step.initialize()  # from the first example
    sums = [eval_step() for _ in range(steps)]
    correct = sum(float(correct[0]) for correct, _ in sums)
    return correct / sum(float(count[0]) for _, count in sums)


def main() -> str:
    """Trains as the flags say; returns the last line to print."""
    repl = replicator.Replicator(FLAGS.devices)
    output_dir = support.output_folder()
    train, test = load_examples()
    batch_size, epochs = FLAGS.global_batch_size, FLAGS.epochs
    support.check_batch_size(
        "global_batch_size", repl.num_replicas, len(train), "training images"
    )
    steps_per_epoch = len(train) // batch_size

    tf.keras.utils.set_random_seed(FLAGS.seed)
    with repl.context():
        model = make_model()
        optimizer = OPTIMIZERS[FLAGS.optimizer](FLAGS.learning_rate)
        optimizer = repl.wrap_optimizer(optimizer)
        optimizer.build(model.trainable_variables)
    run = support.Run(
        output_dir,
        support.settings("global_batch_size", "learning_rate", "optimizer", "seed"),
        {"model": model, "optimizer": optimizer},
        steps=epochs * steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        resume=FLAGS.resume,
        panels=support.LOSS_AND_ACCURACY,
    )
    train_fn, eval_fn = make_steps(repl, model, optimizer)
    rows = train.images, train.labels
    train_step = repl.build(
        train_fn, support.shuffled_input(rows, batch_size, FLAGS.seed, run.step)
    )
    rows = test.images, test.labels
    eval_step = repl.build(eval_fn, support.single_pass_input(rows, batch_size))

    calls = math.ceil(len(test) / batch_size)
    accuracy = run.train(train_step, lambda: evaluate(eval_step, calls))
    return f"Test accuracy {accuracy:.4f}. Results are in {output_dir}."


if __name__ == "__main__":
    support.start(main)
