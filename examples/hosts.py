# SPDX-License-Identifier: Apache-2.0
"""Trains a small convolutional network on handwritten digits, on all available hosts.

    python -m replicator.launch --hosts=localhost,host-b --tunnel examples/hosts.py

or, to try it on one machine, with --nnodes=2 in place of --hosts and --tunnel. The
launcher starts a server on each host; this program runs once, next to the launcher. The
data are the 1,797 images of scikit-learn's `load_digits`. The output folder gets

    checkpoints/  the last three, after each epoch: model, optimizer, steps and history
    history.json  the loss of every step and the test accuracy after every epoch
    model.keras   the trained model, to be loaded anywhere

With the launcher's `--max-restarts=N` the training survives the loss of a host: it
continues from the last checkpoint. SIGTERM leaves one and ends with status 143;
--resume continues. The losses are those of an uninterrupted run. The images of a step
depend only on the seed and the step, so a run may continue with more hosts or fewer, or
on one; then only the order of float32 additions differs, and its effect on training.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import support

import numpy as np
import tensorflow as tf
from absl import flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import replicator

TEST_SHARE = 0.2  # of the images: 360
MOMENTUM = 0.9
RESTARTS = "REPLICATOR_RESTARTS"  # the number of the launcher's restarts

FLAGS = flags.FLAGS
support.define_flags("runs/hosts", devices=None, epochs=10)  # and --seed, --resume
support.define_count("global_batch_size", 64, "Images per step, on all hosts together.")
support.define_positive(
    "learning_rate", 0.05, "The learning rate of SGD with momentum."
)


# --- Data and model -------------------------------------------------------------------


def load_examples() -> tuple[support.Examples, support.Examples]:
    """Returns the training and the test examples, stratified by digit."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=TEST_SHARE, stratify=labels, random_state=0
    )
    return (
        support.Examples(train_images, train_labels),
        support.Examples(test_images, test_labels),
    )


def make_model() -> tf.keras.Model:
    """Returns a network from images [n, 8, 8, 1] to logits [n, 10]."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def training_step(
    repl: replicator.Replicator,
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
) -> Callable[..., Any]:
    """Returns the step_fn for training."""
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train_step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(images, training=True))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return repl.all_reduce(loss, "mean")

    return train_step


# --- Training ------------------------------------------------------------------------


class Training:
    """One life of a training: makes everything, and restores the last checkpoint.

    Args:
        cluster: The hosts.
        settings: Flags that affect the losses; a resumed run must have the same.
        epochs: How many to train, counted from the start of the first run.
        output_dir: An existing folder for the results, on this host.

    Raises:
        support.UsageError: There are too few images for a batch, or the checkpoint is
            of a run with other settings.
    """

    def __init__(
        self,
        cluster: replicator.Cluster,
        settings: Mapping[str, Any],
        epochs: int,
        output_dir: Path,
    ) -> None:
        train, test = load_examples()
        repl = replicator.Replicator(cluster.devices)
        support.check_batch_size("global_batch_size", repl.num_replicas, len(train))
        batch_size, seed = settings["global_batch_size"], settings["seed"]
        self.steps_per_epoch = len(train) // batch_size
        self.epochs, self.output_dir = epochs, output_dir

        tf.keras.utils.set_random_seed(seed)
        with repl.context():
            self.model = make_model()
            optimizer = tf.keras.optimizers.SGD(settings["learning_rate"], MOMENTUM)
            optimizer = repl.wrap_optimizer(optimizer)
            optimizer.build(self.model.trainable_variables)
        self.history = support.History(settings)
        self.checkpoint = cluster.checkpoint(
            output_dir / "checkpoints",
            model=self.model,
            optimizer=optimizer,
            history=self.history,
        )
        self._check(settings)

        # These functions run here; their Datasets run on the replicas' hosts, so that
        # no images cross the network during the training.
        first, rows = self.checkpoint.step, (train.images, train.labels)
        self.train_step = repl.build(
            training_step(repl, self.model, optimizer),
            support.shuffled_input(rows, batch_size, seed, first),
        )
        self.accuracy = support.accuracy_on(repl, self.model, test, batch_size)
        hosts = ", ".join(cluster.hosts)
        tqdm.write(f"{repl.num_replicas} replicas on {hosts}; step {first}")

    def run(self) -> float:
        """Trains to the last epoch; returns the test accuracy."""
        total = self.epochs * self.steps_per_epoch
        steps = self.checkpoint.steps(total, every=self.steps_per_epoch)
        first = self.checkpoint.step
        with tqdm(total=total, initial=first, unit="step", desc="training") as progress:
            for step in steps:
                loss = float(self.train_step()[0])
                self.history.log(step + 1, loss=loss)
                progress.set_postfix(loss=f"{loss:.4f}", refresh=False)
                progress.update()
                if (step + 1) % self.steps_per_epoch == 0:
                    epoch = (step + 1) // self.steps_per_epoch
                    progress.write(self._finish_epoch(epoch))
        self.model.save(self.output_dir / "model.keras")
        return self.history.last("accuracy")

    def _finish_epoch(self, epoch: int) -> str:
        """Evaluates; returns a line about the epoch."""
        self.history.log(epoch * self.steps_per_epoch, accuracy=self.accuracy())
        self.history.save(self.output_dir / "history.json")
        return (
            f"epoch {epoch:{len(str(self.epochs))}}/{self.epochs}"
            f"  loss {self.history.last('loss', self.steps_per_epoch):.4f}"
            f"  test accuracy {self.history.last('accuracy'):.4f}"
        )

    def _check(self, asked: Mapping[str, Any]) -> None:
        """Raises UsageError if a resumed run differs from its beginning."""
        support.check_settings(asked, self.history.settings)
        epochs_done = self.checkpoint.step / self.steps_per_epoch
        if epochs_done > self.epochs:
            raise support.UsageError(
                f"--resume: --epochs={self.epochs}, but the run has been trained for "
                f"{epochs_done:g} epochs already"
            )


def train(
    cluster: replicator.Cluster,
    settings: Mapping[str, Any],
    epochs: int,
    output_dir: Path,
) -> float:
    """Trains from the last checkpoint on; called again after the loss of a host."""
    return Training(cluster, settings, epochs, output_dir).run()


# --- The program ----------------------------------------------------------------------


def prepare() -> Path:
    """Returns the folder for the results, without those of another run.

    Raises:
        support.UsageError: It is not writable, or has nothing to resume from.
    """
    path = support.output_folder()
    checkpoints = path / "checkpoints"
    if FLAGS.resume and tf.train.latest_checkpoint(checkpoints) is None:
        raise support.UsageError(f"--resume: there is no checkpoint in {path}")
    if not FLAGS.resume and not int(os.environ.get(RESTARTS) or 0):
        shutil.rmtree(checkpoints, ignore_errors=True)
    return path


def main() -> str:
    """Trains as the flags say; returns the last line to print."""
    output_dir = prepare()
    settings = support.settings("global_batch_size", "learning_rate", "seed")
    try:
        accuracy = replicator.resilient(
            functools.partial(
                train, settings=settings, epochs=FLAGS.epochs, output_dir=output_dir
            )
        )
    except KeyboardInterrupt:
        text = "Interrupted; continue from the last epoch with --resume."
        raise support.Interrupted(signal.SIGINT, text) from None
    return f"Test accuracy {accuracy:.4f}. Results are in {output_dir}."


if __name__ == "__main__":
    support.start(main)
