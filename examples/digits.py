"""Trains a small convolutional network on handwritten digits, on several replicas.

    python examples/digits.py --devices=CPU:0,CPU:1 --epochs=20

The data are the 1,797 images of scikit-learn's `load_digits`. The output folder gets

    checkpoints/  the model, the optimizer and the step, after each epoch
    history.json  the loss of every step and the test accuracy after every epoch
    summaries/    the same for TensorBoard: tensorboard --logdir runs/digits
    curves.png    the same as a picture

Ctrl-C stops after the step at hand and leaves a checkpoint. --resume goes on from it
and reaches the losses of a run that was never interrupted: which images a step sees
depends on the seed and the step alone. It may go on with more replicas or fewer; then
the losses differ a little, since each replica normalizes by its own images.
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

# Fewer banners, and no kernels whose rounding differs from machine to machine.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import numpy as np
import tensorflow as tf
from absl import app, flags, logging
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import replicator

OPTIMIZERS: dict[str, Callable[[float], tf.keras.optimizers.Optimizer]] = {
    "adam": tf.keras.optimizers.Adam,
    "adamw": tf.keras.optimizers.AdamW,
    "lion": tf.keras.optimizers.Lion,
    "momentum": functools.partial(tf.keras.optimizers.SGD, momentum=0.9),
    "rmsprop": tf.keras.optimizers.RMSprop,
    "sgd": tf.keras.optimizers.SGD,
}
TEST_SHARE = 0.2  # of the images; 360 of them
INTERRUPTED = 128 + signal.SIGINT  # the shells' exit status for it, 130

FLAGS = flags.FLAGS
flags.DEFINE_list("devices", ["CPU:0", "CPU:1"], "One device per replica.")
flags.DEFINE_integer("epochs", 20, "Passes over the training images.", lower_bound=1)
flags.DEFINE_integer(
    "global_batch_size", 64, "Images per step, on all replicas together.", lower_bound=1
)
flags.DEFINE_float("learning_rate", 1e-3, "The optimizer's learning rate.")
flags.DEFINE_enum("optimizer", "adam", sorted(OPTIMIZERS), "Which optimizer to use.")
flags.DEFINE_integer("seed", 1, "Of the initial weights and the order of the images.")
flags.DEFINE_string("output_dir", "runs/digits", "Where the results go.")
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


def training_input(
    examples: Examples, settings: Settings, epochs: int, first_step: int
) -> Callable[[replicator.InputContext], tf.data.Dataset]:
    """Returns the input_fn of the training steps from `first_step` on.

    Each epoch is shuffled anew and dealt to the replicas so that the images of a step,
    taken together, are the same for any number of replicas. The images that do not fill
    a whole batch are left out; in the next epoch they are others.
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


def evaluation_input(
    examples: Examples, global_batch_size: int
) -> Callable[[replicator.InputContext], tf.data.Dataset]:
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


# --- What a run leaves behind --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the losses of a run; a resumed run must have the same."""

    global_batch_size: int
    learning_rate: float
    optimizer: str
    seed: int


@dataclasses.dataclass
class History:
    """The loss of every step and the test accuracy after every epoch."""

    settings: Settings
    loss: list[float] = dataclasses.field(default_factory=list)
    accuracy: list[float] = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes all of it or, if something goes wrong, nothing."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> History:
        """Reads what `save` wrote."""
        saved = json.loads(path.read_text())
        return cls(Settings(**saved["settings"]), saved["loss"], saved["accuracy"])


def plot_curves(history: History, steps_per_epoch: int, path: Path) -> None:
    """Draws the loss of every step and the test accuracy after every epoch."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.arange(1, len(history.loss) + 1)
    left.plot(steps / steps_per_epoch, history.loss, linewidth=1)
    left.set(xlabel="epoch", ylabel="training loss", yscale="log")
    epochs = np.arange(1, len(history.accuracy) + 1)
    right.plot(epochs, history.accuracy, marker=".")
    right.set(xlabel="epoch", ylabel="test accuracy")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


class Interruption:
    """Notes the first Ctrl-C, so that the step at hand is finished and saved.

    A second one stops the program at once.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interruption:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, signum: int, frame: object) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._before)


# --- Training ------------------------------------------------------------------------


class Training:
    """One run: builds everything, and goes on from a checkpoint if told to.

    Args:
        repl: What to run on.
        settings: What decides the losses.
        epochs: How many to train, counted from the start of the first run.
        output_dir: An existing folder for the results.
        resume: Whether to go on from the checkpoint in it.

    Raises:
        UsageError: There are too few images for a batch, or no such run to resume.
        replicator.InputError: The replicas do not divide the batch.
    """

    def __init__(
        self,
        repl: replicator.Replicator,
        settings: Settings,
        epochs: int,
        output_dir: Path,
        resume: bool,
    ) -> None:
        train, test = load_examples()
        check_batch_size(settings.global_batch_size, repl.num_replicas, len(train))
        self.epochs = epochs
        self.output_dir = output_dir
        self.steps_per_epoch = len(train) // settings.global_batch_size
        self.steps = epochs * self.steps_per_epoch
        self.eval_steps = math.ceil(len(test) / settings.global_batch_size)

        tf.keras.utils.set_random_seed(settings.seed)
        with repl.context():
            model = make_model()
            optimizer = OPTIMIZERS[settings.optimizer](settings.learning_rate)
            optimizer = repl.wrap_optimizer(optimizer)
            optimizer.build(model.trainable_variables)
        self.step = tf.Variable(0, dtype=tf.int64)
        self.checkpoints = tf.train.CheckpointManager(
            tf.train.Checkpoint(model=model, optimizer=optimizer, step=self.step),
            directory=str(output_dir / "checkpoints"),
            max_to_keep=3,
        )
        if resume:
            self.history = self._restore(settings)
        else:
            self.history = History(settings)
            shutil.rmtree(output_dir / "checkpoints", ignore_errors=True)
            shutil.rmtree(output_dir / "summaries", ignore_errors=True)

        train_step, eval_step = make_steps(repl, model, optimizer)
        self.train_step = repl.build(
            train_step, training_input(train, settings, epochs, int(self.step))
        )
        self.eval_step = repl.build(
            eval_step, evaluation_input(test, settings.global_batch_size)
        )

    def run(self) -> bool:
        """Trains to the last epoch; returns False if it was interrupted before."""
        done = int(self.step)
        writer = tf.summary.create_file_writer(str(self.output_dir / "summaries"))
        progress = tqdm(total=self.steps, initial=done, unit="step", desc="training")
        with writer.as_default(), Interruption() as interruption, progress:
            while done < self.steps and not interruption.requested:
                loss = float(self.train_step()[0])
                self.step.assign_add(1)
                done += 1
                self.history.loss.append(loss)
                tf.summary.scalar("loss", loss, step=done)
                progress.set_postfix(loss=f"{loss:.4f}", refresh=False)
                progress.update()
                if done % self.steps_per_epoch == 0:
                    progress.write(self._finish_epoch(done // self.steps_per_epoch))
            self._save()
        plot_curves(self.history, self.steps_per_epoch, self.output_dir / "curves.png")
        return done == self.steps

    def evaluate(self) -> float:
        """Returns the share of the test examples that the model gets right."""
        self.eval_step.initialize()  # from the first example
        sums = [self.eval_step() for _ in range(self.eval_steps)]
        correct = sum(float(correct[0]) for correct, _ in sums)
        return correct / sum(float(count[0]) for _, count in sums)

    def _finish_epoch(self, epoch: int) -> str:
        """Evaluates and saves; returns a line that tells of the epoch."""
        accuracy = self.evaluate()
        self.history.accuracy.append(accuracy)
        tf.summary.scalar("test_accuracy", accuracy, step=epoch * self.steps_per_epoch)
        self._save()
        loss = np.mean(self.history.loss[-self.steps_per_epoch :])
        width = len(str(self.epochs))
        return (
            f"epoch {epoch:{width}}/{self.epochs}"
            f"  loss {loss:.4f}  test accuracy {accuracy:.4f}"
        )

    def _save(self) -> None:
        # The history first: what it has in excess is cut off when a run is resumed.
        self.history.save(self.output_dir / "history.json")
        self.checkpoints.save(checkpoint_number=int(self.step))

    def _restore(self, settings: Settings) -> History:
        """Restores the latest checkpoint; returns the history up to its step."""
        latest = self.checkpoints.latest_checkpoint
        if latest is None:
            raise UsageError(f"--resume: there is no checkpoint in {self.output_dir}")
        try:
            history = History.load(self.output_dir / "history.json")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--resume: {self.output_dir}/history.json cannot be read: {error!r}"
            ) from error
        check_settings(settings, history.settings)
        try:
            self.checkpoints.checkpoint.restore(latest).assert_consumed()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            raise UsageError(f"--resume: cannot restore {latest}: {error}") from error
        done = int(self.step)
        if done > self.steps:
            raise UsageError(
                f"--resume: --epochs={self.epochs}, but the run has been trained for "
                f"{done / self.steps_per_epoch:g} epochs already"
            )
        del history.loss[done:]
        del history.accuracy[done // self.steps_per_epoch :]
        return history


# --- Checking the flags --------------------------------------------------------------


def check_batch_size(global_batch_size: int, num_replicas: int, examples: int) -> None:
    """Raises an error unless the replicas divide it, and there are enough examples."""
    context = replicator.InputContext(0, num_replicas, 0, num_replicas)
    context.per_replica_batch_size(global_batch_size)
    if global_batch_size > examples:
        raise UsageError(
            f"--global_batch_size={global_batch_size} is more than the {examples} "
            "training images"
        )


def check_settings(asked: Settings, saved: Settings) -> None:
    """Raises UsageError unless a run that is resumed goes on as it began."""
    for field in dataclasses.fields(Settings):
        new, old = getattr(asked, field.name), getattr(saved, field.name)
        if new != old:
            raise UsageError(
                f"--resume: the run began with --{field.name}={old}, not {new}"
            )


def writable_folder(name: str) -> Path:
    """Returns the folder, made if needed; raises UsageError if it is not writable."""
    try:
        path = Path(name)
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UsageError(f"--output_dir={name} is not writable: {error}") from error
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


def explain(error: Exception) -> int:
    """Prints what went wrong in one line; returns the exit status for it."""
    print("digits.py: error:", " ".join(str(error).split()), file=sys.stderr)
    return 2


def main(argv: Sequence[str]) -> int:
    """Trains as the flags say; returns the exit status."""
    del argv  # parse_flags has dealt with it
    logging.set_verbosity(logging.WARNING)
    settings = Settings(
        FLAGS.global_batch_size, FLAGS.learning_rate, FLAGS.optimizer, FLAGS.seed
    )
    try:
        repl = replicator.Replicator(FLAGS.devices)
        output_dir = writable_folder(FLAGS.output_dir)
        training = Training(repl, settings, FLAGS.epochs, output_dir, FLAGS.resume)
    except (UsageError, replicator.DeviceError, replicator.InputError) as error:
        return explain(error)
    except KeyboardInterrupt:
        return INTERRUPTED  # nothing was trained yet
    if not training.run():
        print(f"Interrupted at step {len(training.history.loss)}; go on with --resume.")
        return INTERRUPTED
    accuracy = training.history.accuracy[-1]
    print(f"Test accuracy {accuracy:.4f}. Results are in {output_dir}.")
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
