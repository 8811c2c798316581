"""Trains a small convolutional network on handwritten digits, on several replicas.

    python examples/digits.py --devices=CPU:0,CPU:1 --epochs=20

The data are the 1,797 images of scikit-learn's `load_digits`. The output folder gets

    checkpoints/  the last three, after each epoch: model, optimizer, step and history
    history.json  the loss of every step and the test accuracy after every epoch
    summaries/    the same for TensorBoard: tensorboard --logdir runs/digits
    curves.png    the same as a picture

Ctrl-C, SIGTERM and SIGHUP stop it after the step at hand and leave a checkpoint.
--resume goes on from the newest checkpoint that can be read, and reaches the losses of
a run that was never interrupted: which images a step sees depends on the seed and the
step alone. It may go on with more replicas or fewer; then the losses differ a little,
since each replica normalizes by its own images.
"""

from __future__ import annotations

import contextlib
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
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that stop a run
MOST_EPOCHS = 1_000_000

FLAGS = flags.FLAGS
flags.DEFINE_list("devices", ["CPU:0", "CPU:1"], "One device per replica.")
flags.DEFINE_integer(
    "epochs", 20, "Passes over the training images.", 1, upper_bound=MOST_EPOCHS
)
flags.DEFINE_integer(
    "global_batch_size", 64, "Images per step, on all replicas together.", lower_bound=1
)
flags.DEFINE_float("learning_rate", 1e-3, "The optimizer's learning rate.")
flags.DEFINE_enum("optimizer", "adam", sorted(OPTIMIZERS), "Which optimizer to use.")
flags.DEFINE_integer(
    "seed", 1, "Of the initial weights and the order of the images.", 0, 2**31 - 1
)
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

    def save(self, path: Path) -> None:
        """Writes all of it or, if something goes wrong, nothing."""
        partial = path.with_suffix(".partial")
        partial.write_text(self.serialize())
        partial.replace(path)


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
    """Notes the first signal to stop, so that the step at hand is finished and saved.

    A second one stops the program at once. What is ignored, as by nohup, stays ignored.

    Attributes:
        signal: The one that has come, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for signum in SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, signum: int, frame: object) -> None:
        self.signal = signum
        self.__exit__()

    def tell(self, write: Callable[[], Any]) -> None:
        """Writes to the terminal; if that has gone, does what SIGHUP does."""
        try:
            write()
        except OSError:
            self.signal = self.signal or signal.SIGHUP
            for number in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


# --- Checkpoints ---------------------------------------------------------------------


class Checkpoints:
    """The last checkpoints of a run, each of another step and written once.

    TensorFlow makes a checkpoint of two files, which get their names one after the
    other, the index last: what has an index is whole, unless it was damaged later.

    Args:
        folder: Where they are.
        **parts: What each of them holds.
    """

    KEPT = 3

    def __init__(self, folder: Path, **parts: Any) -> None:
        self._folder = folder
        self._checkpoint = tf.train.Checkpoint(**parts)
        self._manager: tf.train.CheckpointManager | None = None

    def found(self) -> list[str]:
        """Returns the names of those on the disk, the newest first."""
        numbered = {
            int(path.stem.removeprefix("ckpt-")): str(path.with_suffix(""))
            for path in self._folder.glob("ckpt-*.index")
            if path.stem.removeprefix("ckpt-").isdecimal()
        }
        return [numbered[number] for number in sorted(numbered, reverse=True)]

    def restore(self, name: str) -> None:
        """Restores all parts from a checkpoint, or raises whatever TensorFlow does."""
        self._checkpoint.restore(name).assert_consumed()

    def begin(self, known: Sequence[str] = ()) -> None:
        """Makes ready for saving.

        Args:
            known: Those that count as the last ones, the newest first. Others may be
                overwritten, and are not deleted.
        """
        if known:
            tf.compat.v1.train.update_checkpoint_state(
                str(self._folder), known[0], list(reversed(known))
            )
        else:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, str(self._folder), self.KEPT
        )

    def save(self, step: int) -> None:
        """Saves all parts, unless that was done at this step."""
        assert self._manager is not None, "begin comes first"
        latest = self._manager.latest_checkpoint
        if latest is None or not latest.endswith(f"-{step}"):
            self._manager.save(checkpoint_number=step)

    def clean(self) -> None:
        """Deletes what a failed attempt to save has left."""
        for path in self._folder.glob("*temp*"):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


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
        self.history = History(settings)
        self.checkpoints = Checkpoints(
            output_dir / "checkpoints",
            model=model,
            optimizer=optimizer,
            step=self.step,
            history=self.history,
        )
        if resume:
            self._restore(settings)
        else:
            self.checkpoints.begin()
            shutil.rmtree(output_dir / "summaries", ignore_errors=True)

        train_step, eval_step = make_steps(repl, model, optimizer)
        self.train_step = repl.build(
            train_step, training_input(train, settings, epochs, int(self.step))
        )
        self.eval_step = repl.build(
            eval_step, evaluation_input(test, settings.global_batch_size)
        )

    def run(self) -> int | None:
        """Trains to the last epoch; returns the signal that has stopped it before."""
        done = int(self.step)
        writer = tf.summary.create_file_writer(str(self.output_dir / "summaries"))
        progress = tqdm(total=self.steps, initial=done, unit="step", desc="training")
        with writer.as_default(), progress, Interruption() as interruption:
            while done < self.steps and interruption.signal is None:
                loss = float(self.train_step()[0])
                self.step.assign_add(1)
                done += 1
                self.history.loss.append(loss)
                tf.summary.scalar("loss", loss, step=done)
                progress.set_postfix(loss=f"{loss:.4f}", refresh=False)
                interruption.tell(progress.update)
                if done % self.steps_per_epoch == 0:
                    line = self._finish_epoch(done // self.steps_per_epoch)
                    interruption.tell(functools.partial(progress.write, line))
            self._save()
            interruption.tell(progress.close)
        plot_curves(self.history, self.steps_per_epoch, self.output_dir / "curves.png")
        return interruption.signal if done < self.steps else None

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
        self.checkpoints.save(int(self.step))
        self.history.save(self.output_dir / "history.json")

    def _restore(self, settings: Settings) -> None:
        """Restores the newest checkpoint that can be read."""
        names = self.checkpoints.found()
        if not names:
            raise UsageError(f"--resume: there is no checkpoint in {self.output_dir}")
        for name in list(names):
            try:
                self._read(name, settings)
                break
            except UsageError:
                raise
            except Exception as error:  # TensorFlow's, protobuf's, json's: many kinds
                warn(f"cannot read {name}, which is left out: {error}")
                names.remove(name)
        else:
            raise UsageError(f"--resume: no checkpoint in {self.output_dir} is whole")
        done = int(self.step)
        if done > self.steps:
            raise UsageError(
                f"--resume: --epochs={self.epochs}, but the run has been trained for "
                f"{done / self.steps_per_epoch:g} epochs already"
            )
        self.checkpoints.begin(names)

    def _read(self, name: str, settings: Settings) -> None:
        """Restores a checkpoint; first what decides whether it is one of this run."""
        first = tf.train.Checkpoint(history=self.history).restore(name)
        first.assert_existing_objects_matched().expect_partial()
        check_settings(settings, self.history.settings)
        self.checkpoints.restore(name)


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


def explain(error: Exception, status: int = 2) -> int:
    """Prints what went wrong in one line; returns the exit status for it."""
    print("digits.py: error:", one_line(error), file=sys.stderr)
    return status


def warn(text: str) -> None:
    """Prints what is wrong, but can be got over, in one line."""
    print("digits.py: warning:", one_line(text), file=sys.stderr)


def one_line(text: object) -> str:
    """Returns a text in one line that is not endless."""
    line = " ".join(str(text).split())
    return line if len(line) <= 500 else f"{line[:500]}..."


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
    except (UsageError, replicator.ReplicatorError) as error:
        return explain(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # nothing was trained yet
    try:
        stopped = training.run()
    except (OSError, tf.errors.OpError) as error:  # of a full disk, say
        training.checkpoints.clean()
        return explain(UsageError(f"stopped, go on with --resume: {error}"), 1)
    if stopped is not None:
        print(f"Interrupted at step {len(training.history.loss)}; go on with --resume.")
        return 128 + stopped  # the shells' exit status for it
    accuracy = training.history.accuracy[-1]
    print(f"Test accuracy {accuracy:.4f}. Results are in {output_dir}.")
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
