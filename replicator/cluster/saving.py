# SPDX-License-Identifier: Apache-2.0
"""Writes and reads checkpoints of one process, or of several."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Protocol

import tensorflow as tf

from replicator.cluster.peers import Peers
from replicator.launch.folders import Folder

_SAVES, _RESTORES = "saves a checkpoint", "restores a checkpoint"
_SECONDS, _MOST_STEPS = 0.5, 1000  # between two agreements on whether to stop
_PIECE = 1 << 24  # bytes of a file per broadcast


class Files(Protocol):
    """The checkpoints in a directory."""

    @property
    def latest(self) -> str | None:
        """The path of the newest checkpoint, or None."""

    def restore(self) -> None:
        """Restores the newest checkpoint, if there is one."""

    def save(self, number: int) -> str:
        """Writes a checkpoint, removes excess old ones, and returns its path."""


class LocalFiles:
    """Checkpoints of one process.

    Args:
        saved: The objects to save.
        directory: The directory of the checkpoints.
        keep: The maximum number of checkpoints.
        options: How to read and write them.
    """

    def __init__(
        self,
        saved: tf.train.Checkpoint,
        directory: str,
        keep: int,
        options: tf.train.CheckpointOptions,
    ) -> None:
        self._saved, self._options = saved, options
        self._manager = tf.train.CheckpointManager(saved, directory, max_to_keep=keep)

    @property
    def latest(self) -> str | None:
        """The path of the newest checkpoint, or None."""
        latest: str | None = self._manager.latest_checkpoint
        return latest

    def restore(self) -> None:
        """Restores the newest checkpoint, if there is one."""
        if self.latest is not None:
            self._saved.restore(self.latest, options=self._options)

    def save(self, number: int) -> str:
        """Writes a checkpoint, removes excess old ones, and returns its path."""
        return str(self._manager.save(checkpoint_number=number, options=self._options))


class JointFiles:
    """Checkpoints of several processes, in a directory of the first.

    All processes save, since each contributes to the saved values, but only the first
    one's files are kept. To restore, the first process sends its files to the others,
    which therefore need no access to its directory.

    Args:
        peers: The processes.
        saved: The objects to save.
        directory: The directory of the checkpoints, on the first host.
        keep: The maximum number of checkpoints.
        options: How to read and write them.
    """

    def __init__(
        self,
        peers: Peers,
        saved: tf.train.Checkpoint,
        directory: str,
        keep: int,
        options: tf.train.CheckpointOptions,
    ) -> None:
        self._peers, self._saved, self._options = peers, saved, options
        # Objects created after `restore` read their values then, so the files stay.
        self._received: Folder | None = None
        self._first = None
        if peers.process == 0:
            self._first = LocalFiles(saved, directory, keep, options)
        self._latest = self._find_latest()

    @property
    def latest(self) -> str | None:
        """The path of the newest checkpoint on the first host, or None."""
        return self._latest

    def _find_latest(self) -> str | None:
        own_latest = None if self._first is None else self._first.latest
        latest: str | None = self._peers.exchange("looks for a checkpoint", own_latest)[
            0
        ]
        return latest

    def restore(self) -> None:
        """Restores the newest checkpoint, if there is one."""
        if self._latest is None:
            return
        path = self._latest
        if self._first is None:
            # Names that another process sends are not paths here.
            self._received = Folder()
            path = os.path.join(self._received.path, "received")
        own_sizes = [] if self._first is None else _sizes(path)
        sizes: list[int] = self._peers.exchange(_RESTORES, own_sizes)[0]
        for k, size in enumerate(sizes):
            self._send(_file(path, k, len(sizes)), int(size))
        self._saved.restore(path, options=self._options)

    def _send(self, path: str, size: int) -> None:
        """Copies a file of the first process to the others."""
        with open(path, "rb" if self._first is not None else "wb") as file:
            for begin in range(0, size, _PIECE):
                count = min(_PIECE, size - begin)
                data = file.read(count) if self._first is not None else bytes(count)
                words = tf.io.decode_raw(data + bytes(-count % 4), tf.int32)
                words = tf.ensure_shape(words, [-(-count // 4)])
                received = self._peers.broadcast(words)
                if self._first is None:
                    file.write(received.numpy().tobytes()[:count])

    def save(self, number: int) -> str:
        """Writes a checkpoint, removes excess old ones, and returns its path."""
        if self._first is not None:
            self._first.save(number)
            self._latest = self._first.latest
        else:
            with Folder() as folder:
                self._saved.write(os.path.join(folder, "dropped"), self._options)
        # No process continues before the checkpoint exists, so that a failure from here
        # on can resume from it.
        self._latest = self._peers.exchange(_SAVES, self._latest)[0]
        return str(self._latest)


def _file(path: str, number: int, count: int) -> str:
    """Returns the path of a file of a checkpoint: first its index, then its data."""
    data = f"data-{number - 1:05d}-of-{count - 1:05d}"  # TensorFlow's names
    return f"{path}.{data if number else 'index'}"


def _sizes(path: str) -> list[int]:
    """Returns the sizes of the files of a checkpoint in bytes, in order."""
    first = f"{os.path.basename(path)}.data-00000-of-*"
    data_files = pathlib.Path(path).parent.glob(first)
    # A run on other devices may have left one with the same number.
    newest = max(data_files, key=lambda file: file.stat().st_mtime)
    count = int(newest.name.rpartition("-")[2]) + 1
    return [os.stat(_file(path, k, count)).st_size for k in range(count)]


def files(
    peers: Peers | None,
    saved: tf.train.Checkpoint,
    directory: str,
    keep: int,
    options: tf.train.CheckpointOptions,
) -> Files:
    """Returns the checkpoints of this process, or of all that run the program.

    Args:
        peers: The processes; None if this one is alone.
        saved: The objects to save.
        directory: The directory of the checkpoints.
        keep: The maximum number of checkpoints.
        options: How to read and write them.
    """
    if peers is None:
        return LocalFiles(saved, directory, keep, options)
    return JointFiles(peers, saved, directory, keep, options)


class StopAgreement:
    """Agrees on when training stops after a signal to any of its processes.

    The processes exchange signals about twice a second, at steps agreed on in advance,
    so that all stop after the same step.

    Args:
        peers: The processes; None if this one is alone.
        step: The number of steps done.
    """

    def __init__(self, peers: Peers | None, step: int) -> None:
        self._peers = peers
        self._last_step, self._next = step, step + 1
        self._since = time.monotonic()

    def stops(self, step: int, is_signalled: bool) -> bool:
        """Returns whether to stop after a step.

        Args:
            step: The number of steps done.
            is_signalled: Whether this process was signalled to stop.
        """
        if self._peers is None:
            return is_signalled
        if step < self._next:
            return False
        now = time.monotonic()
        seconds_per_step = (now - self._since) / (step - self._last_step)
        self._last_step, self._since = step, now
        next_step = step + max(
            1, min(_MOST_STEPS, round(_SECONDS / max(seconds_per_step, 1e-9)))
        )
        answers = self._peers.exchange("counts steps", [is_signalled, next_step])
        self._next = answers[0][1]
        return any(stops for stops, _ in answers)
