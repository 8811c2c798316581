# SPDX-License-Identifier: Apache-2.0
"""`Checkpoint`: saves training state, to resume after a fault or a restart."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.cluster import faults, peers, saving, state
from replicator.hosts.asynchronous import board as boards
from replicator.hosts.asynchronous import membership

TERMINATED = 128 + signal.SIGTERM  # the exit status that shells give to SIGTERM


class Checkpoint:
    """The checkpoints of a training run, in a directory of this process.

    A tf.train.CheckpointManager writes them, with the number of steps done. A program
    that is killed while writing one resumes from the one before. This process reads and
    writes variables on other hosts, so only it needs the directory.

    `cluster.checkpoint(directory, v=v)` makes one, too.

    Example:
        >>> with repl.context():
        ...     v = tf.Variable(0.0)
        >>> def step_fn(x):
        ...     v.assign_add(x)
        >>> objects = {"v": v, "inputs": repl.inputs}
        >>> checkpoint = replicator.Checkpoint("saved", objects)
        >>> data = tf.data.Dataset.from_tensors(0.5).repeat()
        >>> for step in checkpoint.steps(10, every=5):  # SIGTERM has it save and end
        ...     _ = repl.run(step_fn, data)
        >>> again = replicator.Checkpoint("saved", objects)  # restores the latest
        >>> again.step, float(v)
        (10, 5.0)

    Args:
        directory: The directory of the checkpoints. The latest is restored at once;
            variables that are created later are restored on creation.
        objects: The objects to save, by name: models, optimizers, variables,
            `repl.inputs`.
        keep: The maximum number of checkpoints.

    Attributes:
        step: The number of steps done.
    """

    def __init__(
        self, directory: str | os.PathLike[str], objects: dict[str, Any], keep: int = 3
    ) -> None:
        _check(objects, keep)
        cpu = state.own_task().replace(device_type="CPU", device_index=0).to_string()
        with tf.device(cpu):
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
        # A name that the objects of users do not have.
        saved = tf.train.Checkpoint(replicator_step=self._step, **objects)
        facts = peers.process_group()
        self._peers = None if facts is None else peers.Peers(facts, checkpoint=True)
        self._files: saving.Files
        options = tf.train.CheckpointOptions(experimental_io_device=cpu)
        with faults.named():
            self._files = saving.files(
                self._peers, saved, os.fspath(directory), keep, options
            )
            member = membership.member()
            if member is not None:
                assert isinstance(self._files, saving.LocalFiles)
                number = next(member.checkpoints)
                self._files = AsynchronousFiles(member, number, self._files, self._step)
            self._files.restore()
            self.step = int(self._step)
        if self.latest is not None:
            logging.info("Restored %s: %d steps are done.", self.latest, self.step)

    @property
    def latest(self) -> str | None:
        """The path of the newest checkpoint, or None.

        Example:
            >>> checkpoint = replicator.Checkpoint("saved", {"v": tf.Variable(1.0)})
            >>> checkpoint.latest is None
            True
        """
        return self._files.latest

    def save(self) -> str:
        """Writes a checkpoint, removes excess old ones, and returns its path.

        Example:
            >>> checkpoint = replicator.Checkpoint("saved", {"v": tf.Variable(1.0)})
            >>> pathlib.Path(checkpoint.save()).name
            'ckpt-0'

        Raises:
            HostLostError: A host was lost meanwhile; earlier checkpoints are intact.
            InputError: The position of an input cannot be saved.
        """
        with faults.named():
            self._step.assign(self.step)
            return self._files.save(self.step)

    def steps(self, total: int, *, every: int = 100) -> Iterator[int]:
        """Yields the numbers of the remaining steps and saves at intervals.

        After SIGTERM, which announces that a host will be taken away, it completes the
        current step, saves a checkpoint and ends the program with status 143.

        Example:
            >>> checkpoint = replicator.Checkpoint("saved", {"v": tf.Variable(1.0)})
            >>> [step for step in checkpoint.steps(3)]
            [0, 1, 2]
            >>> [step for step in checkpoint.steps(5)]
            [3, 4]

        Args:
            total: The number of steps in all, including those already done.
            every: The number of steps between checkpoints; the last step is always
                saved.

        Raises:
            HostLostError: A host was lost while a checkpoint was saved.
        """
        for name, value in (("total", total), ("every", every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise errors.ArgumentError(
                    f"steps was given {name}={errors.repr_of(value)}.",
                    fix="pass a number of steps, at least 1.",
                )
        return self._steps(total, every)

    def _steps(self, total: int, every: int) -> Iterator[int]:
        with _termination() as signals:
            agreement = saving.StopAgreement(self._peers, self.step)
            while self.step < total:
                yield self.step
                self.step += 1
                stopping = agreement.stops(self.step, bool(signals))
                if stopping or self.step % every == 0 or self.step == total:
                    self.save()
                if stopping:
                    signals.clear()  # the signal has been handled
                    logging.warning("SIGTERM: saved after %d steps.", self.step)
                    raise SystemExit(TERMINATED)


@contextlib.contextmanager
def _termination() -> Iterator[list[int]]:
    """Yields a list to which each SIGTERM is appended; in the main thread only.

    If it is not empty at the end of the block, as when a step has failed, SIGTERM is
    sent again, to the previous handler: a program that receives it must not go on.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Python allows only the main thread to set handlers
        return
    handler = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
        if signals:
            os.kill(os.getpid(), signal.SIGTERM)


def _check(objects: dict[str, Any], keep: Any) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise errors.ArgumentError(
            f"checkpoint was given keep={errors.repr_of(keep)}.",
            fix="pass the number of checkpoints to keep, at least 1.",
        )
    for name, value in objects.items():
        if not isinstance(value, tf.__internal__.tracking.Trackable):
            raise errors.ArgumentError(
                f"checkpoint was given {name}={errors.repr_of(value)}, which "
                "tf.train.Checkpoint cannot hold.",
                fix="pass models, optimizers, variables, or repl.inputs.",
            )


class AsynchronousFiles:
    """The checkpoints of all programs, in a directory of the first.

    The first program restores the newest checkpoint, once in the life of the servers. A
    program that restarts while others go on uses the current variables, and resumes
    from the step at which it last called `save`.

    Args:
        member: This program.
        number: The number of these checkpoints among those of the program.
        first: Reads and writes the checkpoints, in the first program.
        step: The variable with the number of steps done.
    """

    def __init__(
        self,
        member: membership.Member,
        number: int,
        first: saving.LocalFiles,
        step: tf.Variable,
    ) -> None:
        program, count = member.board.program, member.board.count
        self._program, self._start, self._first = program, count, first
        self._step = step
        # The steps done by each program, and last those restored; each plus one, as 0
        # stands for none.
        self._steps = member.store.table(f"checkpoints/{number}", count + 1)

    @property
    def latest(self) -> str | None:
        """The path of the newest checkpoint on the first host; None elsewhere."""
        return self._first.latest if self._program == 0 else None

    def restore(self) -> None:
        """Restores the newest checkpoint, unless that was done; waits until it is."""
        if self._program == 0 and not self._recorded(self._start):
            self._first.restore()
            self._record(self._start, int(self._step))
        boards.wait(lambda: self._recorded(self._start) > 0, math.inf)
        self._step.assign(self._recorded(self._program) or self._recorded(self._start))
        self._step.assign_sub(1)

    def save(self, number: int) -> str:
        """Records this program's steps; the first program also writes a checkpoint."""
        path = self._first.save(number) if self._program == 0 else ""
        self._record(self._program, number)
        return path

    def _recorded(self, index: int) -> int:
        return int(self._steps.numpy()[index])

    def _record(self, index: int, steps: int) -> None:
        indices = tf.constant([index], tf.int64)
        value = tf.constant([steps + 1], tf.int64)
        self._steps.scatter_update(tf.IndexedSlices(value, indices))
