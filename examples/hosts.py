# SPDX-License-Identifier: Apache-2.0
"""Trains a small convolutional network on handwritten digits, on all hosts there are.

    python -m replicator.launch --hosts=localhost,host-b --tunnel examples/hosts.py

or, to try it on one machine, with --nnodes=2 in place of --hosts and --tunnel. The
launcher starts a server on each host; this program runs once, where the launcher is.
The data are the 1,797 images of scikit-learn's `load_digits`. The output folder gets

    checkpoints/  the last three, after each epoch: model, optimizer, steps and history
    history.json  the loss of every step and the test accuracy after every epoch
    model.keras   the trained model, to be loaded anywhere

With `--max-restarts=N` of the launcher the training goes on after a host was lost, from
the last checkpoint. SIGTERM leaves one and ends with status 143; --resume goes on. The
losses are those of a run that was never interrupted. Which images a step sees depends
on the seed and the step alone, so a run may go on with more hosts or fewer, or on one;
then only the order differs in which float32 is added up, and what training makes of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # fewer banners

import numpy as np
import tensorflow as tf
from absl import app, flags, logging
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import replicator

TEST_SHARE = 0.2  # of the images; 360 of them
MOMENTUM = 0.9
MOST_EPOCHS = 1_000_000
RESTARTS = "REPLICATOR_RESTARTS"  # how often the launcher has started all anew

FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 10, "Passes over the training images.", 1, MOST_EPOCHS)
flags.DEFINE_integer(
    "global_batch_size", 64, "Images per step, on all hosts together.", lower_bound=1
)
flags.DEFINE_float("learning_rate", 0.05, "The learning rate of SGD with momentum.")
flags.DEFINE_integer(
    "seed", 1, "Of the initial weights and the order of the images.", 0, 2**31 - 1
)
flags.DEFINE_string("output_dir", "runs/hosts", "Where the results go, on this host.")
flags.DEFINE_bool(
    "resume", False, "Go on from the checkpoint in --output_dir instead of over it."
)
flags.register_validator(
    "learning_rate", lambda rate: 0 < rate < math.inf, "must be a positive number"
)


class UsageError(Exception):
    """The flags ask for something that cannot be done."""


# --- Data ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Examples:
    """Images, float32 [n, 8, 8, 1] within 0 to 1, and their labels, int64 [n]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def load_examples() -> tuple[Examples, Examples]:
    """Returns the training and the test examples, with all digits evenly in both."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=TEST_SHARE, stratify=labels, random_state=0
    )
    return Examples(train_images, train_labels), Examples(test_images, test_labels)


InputFn = Callable[[replicator.InputContext], tf.data.Dataset]


def training_input(
    examples: Examples, settings: Settings, epochs: int, first_step: int
) -> InputFn:
    """Returns the input_fn of the training steps from `first_step` on.

    It is called here, once per replica; the Datasets run on the replicas' hosts, so
    that no images cross the network once the training has begun. Each epoch is shuffled
    anew and dealt to the replicas so that the images of a step, taken together, are the
    same for any number of replicas.
    """
    batch_size = settings.global_batch_size
    whole_batches = len(examples) // batch_size * batch_size

    def epoch_order(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(len(examples)), seed=[settings.seed, epoch]
        )
        return tf.data.Dataset.from_tensor_slices(order[:whole_batches])

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        order = tf.data.Dataset.range(epochs).flat_map(epoch_order)
        own = order.shard(ctx.num_pipelines, ctx.pipeline_id)
        batches = own.batch(ctx.per_replica_batch_size(batch_size))
        return batches.skip(first_step).map(
            lambda index: (
                tf.gather(examples.images, index),
                tf.gather(examples.labels, index),
            )
        )

    return input_fn


def evaluation_input(examples: Examples, global_batch_size: int) -> InputFn:
    """Returns the input_fn for one pass over all examples: images, labels, weights.

    The examples are filled up to whole batches by blanks of weight 0, so that every
    replica makes the same number of steps and every example counts once.
    """
    blanks = -len(examples) % global_batch_size
    images = np.pad(examples.images, [(0, blanks), (0, 0), (0, 0), (0, 0)])
    labels = np.pad(examples.labels, [(0, blanks)])
    weights = np.pad(np.ones(len(examples), np.float32), [(0, blanks)])

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((images, labels, weights))
        own = dataset.shard(ctx.num_pipelines, ctx.pipeline_id)
        return own.batch(ctx.per_replica_batch_size(global_batch_size))

    return input_fn


# --- The model and its two steps -----------------------------------------------------


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


# --- What a run leaves behind --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the losses of a run; a resumed run must have the same."""

    global_batch_size: int
    learning_rate: float
    seed: int


@dataclasses.dataclass(eq=False)  # checkpoints look for what they hold by identity
class History(tf.train.experimental.PythonState):
    """The loss of every step and the test accuracy after every epoch.

    A part of each checkpoint, so that the two are of one step whenever a run ends.
    """

    settings: Settings
    loss: list[float] = dataclasses.field(default_factory=list)
    accuracy: list[float] = dataclasses.field(default_factory=list)

    def serialize(self) -> str:
        """Called when a checkpoint is saved; returns the history as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def deserialize(self, string_value: bytes) -> None:
        """Called when a checkpoint is restored."""
        saved = json.loads(string_value)
        self.settings = Settings(**saved["settings"])
        self.loss, self.accuracy = saved["loss"], saved["accuracy"]


# --- Training ------------------------------------------------------------------------


class Training:
    """One life of a training: makes everything, and restores the last checkpoint.

    Args:
        cluster: The hosts.
        settings: What decides the losses.
        epochs: How many to train, counted from the start of the first run.
        output_dir: An existing folder for the results, of this host.

    Raises:
        UsageError: There are too few images for a batch, or the checkpoint is of a run
            with other settings.
    """

    def __init__(
        self,
        cluster: replicator.Cluster,
        settings: Settings,
        epochs: int,
        output_dir: Path,
    ) -> None:
        train, test = load_examples()
        if settings.global_batch_size > len(train):
            raise UsageError(
                f"--global_batch_size={settings.global_batch_size} is more than the "
                f"{len(train)} training images"
            )
        self.steps_per_epoch = len(train) // settings.global_batch_size
        self.eval_steps = math.ceil(len(test) / settings.global_batch_size)
        self.epochs, self.output_dir = epochs, output_dir

        repl = replicator.Replicator(cluster.devices)
        tf.keras.utils.set_random_seed(settings.seed)
        with repl.context():
            self.model = make_model()
            optimizer = tf.keras.optimizers.SGD(settings.learning_rate, MOMENTUM)
            optimizer = repl.wrap_optimizer(optimizer)
            optimizer.build(self.model.trainable_variables)
        self.history = History(settings)
        self.checkpoint = cluster.checkpoint(
            output_dir / "checkpoints",
            model=self.model,
            optimizer=optimizer,
            history=self.history,
        )
        self._check(settings)

        train_step, eval_step = make_steps(repl, self.model, optimizer)
        first = self.checkpoint.step
        self.train_step = repl.build(
            train_step, training_input(train, settings, epochs, first)
        )
        self.eval_step = repl.build(
            eval_step, evaluation_input(test, settings.global_batch_size)
        )
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
                self.history.loss.append(loss)
                progress.set_postfix(loss=f"{loss:.4f}", refresh=False)
                progress.update()
                if (step + 1) % self.steps_per_epoch == 0:
                    epoch = (step + 1) // self.steps_per_epoch
                    progress.write(self._finish_epoch(epoch))
        self.model.save(self.output_dir / "model.keras")
        return self.history.accuracy[-1]

    def _finish_epoch(self, epoch: int) -> str:
        """Evaluates; returns a line that tells of the epoch."""
        self.eval_step.initialize()  # from the first example
        sums = [self.eval_step() for _ in range(self.eval_steps)]
        correct = sum(float(correct[0]) for correct, _ in sums)
        accuracy = correct / sum(float(count[0]) for _, count in sums)
        self.history.accuracy.append(accuracy)
        write(self.output_dir / "history.json", self.history.serialize())
        loss = np.mean(self.history.loss[-self.steps_per_epoch :])
        width = len(str(self.epochs))
        return (
            f"epoch {epoch:{width}}/{self.epochs}"
            f"  loss {loss:.4f}  test accuracy {accuracy:.4f}"
        )

    def _check(self, asked: Settings) -> None:
        """Raises UsageError unless a run that is resumed goes on as it began."""
        for field in dataclasses.fields(Settings):
            new = getattr(asked, field.name)
            old = getattr(self.history.settings, field.name)
            if new != old:
                raise UsageError(
                    f"--resume: the run began with --{field.name}={old}, not {new}"
                )
        done = self.checkpoint.step / self.steps_per_epoch
        if done > self.epochs:
            raise UsageError(
                f"--resume: --epochs={self.epochs}, but the run has been trained for "
                f"{done:g} epochs already"
            )


def train(
    cluster: replicator.Cluster, settings: Settings, epochs: int, output_dir: Path
) -> float:
    """Trains, from the last checkpoint on; called again after a host was lost."""
    return Training(cluster, settings, epochs, output_dir).run()


# --- Files and flags -----------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Writes all of a file or, if something goes wrong, nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def prepare(name: str, resume: bool) -> Path:
    """Returns the folder for the results, without what another run has left.

    Raises:
        UsageError: It is not writable, or there is nothing in it to go on from.
    """
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UsageError(f"--output_dir={name} is not writable: {error}") from error
    checkpoints = path / "checkpoints"
    if resume and tf.train.latest_checkpoint(checkpoints) is None:
        raise UsageError(f"--resume: there is no checkpoint in {path}")
    if not resume and not int(os.environ.get(RESTARTS) or 0):
        shutil.rmtree(checkpoints, ignore_errors=True)
    return path


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the command line; a mistake in it ends the program, with one line."""
    try:
        extra = FLAGS(argv)[1:]
    except flags.Error as error:
        sys.exit(explain(error))
    if extra:
        sys.exit(explain(UsageError(f"unexpected argument {extra[0]!r}")))
    return []


def explain(error: Exception, status: int = 2) -> int:
    """Prints what went wrong in one line; returns the exit status for it."""
    print("hosts.py: error:", one_line(error), file=sys.stderr)
    return status


def one_line(error: Exception) -> str:
    """Returns what an error says in one line that is not endless."""
    what, *lines = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, replicator.ReplicatorError):  # which end in the way out
        lines = [line for line in lines if line.lstrip().startswith("Fix: ")]
    line = " ".join(" ".join([what, *lines]).split())
    return line if len(line) <= 500 else f"{line[:500]}..."


def main(argv: Sequence[str]) -> int:
    """Trains as the flags say; returns the exit status."""
    del argv  # parse_flags has dealt with it
    logging.set_verbosity(logging.WARNING)
    settings = Settings(FLAGS.global_batch_size, FLAGS.learning_rate, FLAGS.seed)
    try:
        output_dir = prepare(FLAGS.output_dir, FLAGS.resume)
        accuracy = replicator.resilient(
            functools.partial(
                train, settings=settings, epochs=FLAGS.epochs, output_dir=output_dir
            )
        )
    except replicator.HostLostError as error:
        return explain(UsageError(f"stopped, go on with --resume: {error}"), 1)
    except (UsageError, replicator.ReplicatorError) as error:
        return explain(error)
    except (OSError, tf.errors.OpError) as error:  # of a full disk, say
        return explain(UsageError(f"stopped, go on with --resume: {error}"), 1)
    except KeyboardInterrupt:
        print("Interrupted; go on from the last epoch with --resume.", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"Test accuracy {accuracy:.4f}. Results are in {output_dir}.")
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
