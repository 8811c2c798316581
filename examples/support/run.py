# SPDX-License-Identifier: Apache-2.0
"""A training run: its steps, and the files in its output folder."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import history as histories
from support.checkpoints import Checkpoints
from support.interruption import Interruption
from support.program import Interrupted, UsageError, warn

import numpy as np
import tensorflow as tf
from tqdm import tqdm

# The names that `Run.train` logs.
LOSS_AND_ACCURACY = (
    histories.Panel(["loss"], "training loss", log=True),
    histories.Panel(["accuracy"], "test accuracy"),
)


class Run:
    """A training that can be stopped and resumed.

    Args:
        output_dir: An existing folder for the results.
        settings: The values of flags that affect the losses, by name; a resumed run
            must have the same.
        parts: The contents of each checkpoint, by name: whatever tf.train.Checkpoint
            takes.
        steps: How many to make, counted from the start of the first run.
        resume: Whether to continue from the newest readable checkpoint.
        steps_per_epoch: If the run is counted in epochs, by --epochs.
        save_every: The number of steps from one checkpoint to the next; by default an
            epoch, else a tenth of the run.
        panels: The contents of curves.png.

    Attributes:
        step: How many steps were made, including the current one.
        history: The logged numbers.
        checkpoints: The run's checkpoints.
        writer: The writer of TensorBoard's summaries.

    Raises:
        UsageError: There is no such run to resume.
    """

    def __init__(
        self,
        output_dir: Path,
        settings: Mapping[str, Any],
        parts: Mapping[str, Any],
        *,
        steps: int,
        resume: bool = False,
        steps_per_epoch: int | None = None,
        save_every: int | None = None,
        panels: Sequence[histories.Panel] = (),
    ) -> None:
        self.output_dir = output_dir
        self.history = histories.History(settings)
        self._settings = dict(settings)
        self._steps, self._steps_per_epoch = steps, steps_per_epoch
        self._save_every = save_every or steps_per_epoch or max(1, steps // 10)
        self._panels = panels
        self._step = tf.Variable(0, dtype=tf.int64)
        self._shown: dict[str, str] = {}
        self._interruption = Interruption()
        self._progress: Any = None
        parts = {**parts, "step": self._step, "history": self.history}
        self.checkpoints = Checkpoints(output_dir / "checkpoints", parts)
        if resume:
            self._restore()
        else:
            self.checkpoints.begin()
            shutil.rmtree(output_dir / "summaries", ignore_errors=True)
        self.writer = tf.summary.create_file_writer(str(output_dir / "summaries"))

    @property
    def step(self) -> int:
        """How many steps were made, including the current one."""
        return int(self._step)

    def steps(self) -> Iterator[int]:
        """Yields the number of each remaining step, from 1 on; saves at intervals.

        Raises:
            Interrupted: A signal has arrived; the current step was finished and saved.
        """
        completed = self.step
        with (
            tqdm(
                total=self._steps, initial=completed, unit="step", desc="training"
            ) as bar,
            self._interruption,
        ):
            self._progress = bar
            while completed < self._steps and self._interruption.signal is None:
                completed += 1
                self._step.assign(completed)
                yield completed
                self._interruption.tell(bar.update)
                if completed % self._save_every == 0:
                    self.save()
            self.save()
            self._interruption.tell(bar.close)
            self._progress = None
        signum = self._interruption.signal
        if self._panels:
            path = self.output_dir / "curves.png"
            histories.plot_curves(
                self.history, self._panels, path, self._steps_per_epoch
            )
        if signum is not None and completed < self._steps:
            text = f"Interrupted at step {completed}; continue with --resume."
            raise Interrupted(signum, text)

    def train(
        self, train_step: Callable[[], Any], test_accuracy: Callable[[], float]
    ) -> float:
        """Makes the steps of a run counted in epochs; prints a line for each epoch.

        Args:
            train_step: Makes a step; returns its loss, on each replica.
            test_accuracy: Is called after each epoch.

        Returns:
            The test accuracy after the last epoch.
        """
        assert self._steps_per_epoch is not None, "it is counted in epochs"
        epochs = self._steps // self._steps_per_epoch
        for step in self.steps():
            self.log(loss=float(train_step()[0]))
            if step % self._steps_per_epoch == 0:
                self.log(accuracy=test_accuracy())
                self.save()  # a printed epoch is never lost
                self.tell(
                    f"epoch {step // self._steps_per_epoch:{len(str(epochs))}}/{epochs}"
                    f"  loss {self.history.last('loss', self._steps_per_epoch):.4f}"
                    f"  test accuracy {self.history.last('accuracy'):.4f}"
                )
        return self.history.last("accuracy")

    def log(self, **numbers: float) -> None:
        """Logs numbers of this step: for history, TensorBoard and progress bar."""
        self.history.log(self.step, **numbers)
        with self.writer.as_default(step=self.step):
            for name, number in numbers.items():
                tf.summary.scalar(name, number)
                self._shown[name] = f"{number:.4f}"
        if self._progress is not None:
            self._progress.set_postfix(self._shown, refresh=False)

    def log_images(self, **images: np.ndarray) -> None:
        """Writes images, [n, height, width, 1] within 0 to 1, for TensorBoard."""
        with self.writer.as_default(step=self.step):
            for name, pixels in images.items():
                tf.summary.image(name, pixels, max_outputs=len(pixels))

    def tell(self, line: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        write = print if self._progress is None else self._progress.write
        self._interruption.tell(functools.partial(write, line))

    def save(self) -> None:
        """Saves a checkpoint of this step, and history.json."""
        self.writer.flush()
        self.checkpoints.save(self.step)
        self.history.save(self.output_dir / "history.json")

    def _restore(self) -> None:
        """Restores the newest readable checkpoint."""
        names = self.checkpoints.found()
        if not names:
            raise UsageError(f"--resume: there is no checkpoint in {self.output_dir}")
        for name in list(names):
            try:
                self._read(name)
                break
            except UsageError:
                raise
            except Exception as error:  # TensorFlow's, protobuf's, json's: many kinds
                warn(f"cannot read {name}, which is skipped: {error}")
                names.remove(name)
        else:
            raise UsageError(
                f"--resume: no checkpoint in {self.output_dir} is complete"
            )
        self._check_length()
        self.checkpoints.begin(names)

    def _read(self, name: str) -> None:
        """Restores a checkpoint; first checks that it belongs to this run."""
        first = tf.train.Checkpoint(history=self.history).restore(name)
        first.assert_existing_objects_matched().expect_partial()
        check_settings(self._settings, self.history.settings)
        self.checkpoints.restore(name)

    def _check_length(self) -> None:
        """Raises UsageError if more steps were made than are requested."""
        flag, unit = (
            ("steps", 1)
            if self._steps_per_epoch is None
            else ("epochs", self._steps_per_epoch)
        )
        if self.step > self._steps:
            raise UsageError(
                f"--resume: --{flag}={self._steps // unit}, but the run has been "
                f"trained for {self.step / unit:g} {flag} already"
            )


def check_settings(asked: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises UsageError if a resumed run differs from its beginning.

    Args:
        asked: The values of flags, by name.
        saved: Those of the resumed run.
    """
    for name, new in asked.items():
        if saved.get(name) != new:
            raise UsageError(
                f"--resume: the run began with --{name}={saved.get(name)}, not {new}"
            )
