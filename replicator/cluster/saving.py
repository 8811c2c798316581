# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints are written and read: by one process, or by several together."""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from typing import Any, Protocol

import tensorflow as tf

from replicator.cluster.peers import Peers

_SAVES, _RESTORES = "saves a checkpoint", "restores a checkpoint"
_SECONDS, _MOST_STEPS = 0.5, 1000  # between two questions whether to stop
_PIECE = 1 << 24  # bytes of a file that are sent at once


class Files(Protocol):
    """The checkpoints in a directory."""

    @property
    def latest(self) -> str | None:
        """The path of the newest, or None."""

    def restore(self) -> None:
        """Restores the newest, if there is one."""

    def save(self, number: int) -> str:
        """Writes one, removes the oldest, and returns its path."""


class Alone:
    """Checkpoints of one process.

    Args:
        saved: What they hold.
        directory: Where they are.
        keep: How many there are at most.
        options: How they are read and written.
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
        """The path of the newest, or None."""
        latest: str | None = self._manager.latest_checkpoint
        return latest

    def restore(self) -> None:
        """Restores the newest, if there is one."""
        if self.latest is not None:
            self._saved.restore(self.latest, options=self._options)

    def save(self, number: int) -> str:
        """Writes one, removes the oldest, and returns its path."""
        return str(self._manager.save(checkpoint_number=number, options=self._options))


class Together:
    """Checkpoints of several processes, in a directory of the first.

    All save, since all have to say what they hold, and what the others write is dropped
    at once. What the first has is sent to the others when it is restored, so they need
    not see its directory.

    Args:
        peers: The processes.
        saved: What checkpoints hold.
        directory: Where they are, on the first host.
        keep: How many there are at most.
        options: How they are read and written.
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
        # What is restored later, when it is made, is read later: it stays till the end.
        self._received: tempfile.TemporaryDirectory[str] | None = None
        self._first = None
        if peers.own == 0:
            self._first = Alone(saved, directory, keep, options)
        self._latest = self._agreed()

    @property
    def latest(self) -> str | None:
        """The path of the newest on the first host, or None."""
        return self._latest

    def _agreed(self) -> str | None:
        own = None if self._first is None else self._first.latest
        latest: str | None = self._peers.exchange("looks for a checkpoint", own)[0]
        return latest

    def restore(self) -> None:
        """Restores the newest, if there is one."""
        if self._latest is None:
            return
        files: list[pathlib.Path] = []
        if self._first is not None:
            files = sorted(pathlib.Path(self._latest).parent.glob(_parts(self._latest)))
        sizes = [[path.name, path.stat().st_size] for path in files]
        listed: list[Any] = self._peers.exchange(_RESTORES, sizes)[0]
        path = self._latest
        if self._first is None:
            self._received = tempfile.TemporaryDirectory("-replicator")
            path = os.path.join(self._received.name, os.path.basename(self._latest))
        for name, size in listed:
            self._send(os.path.join(os.path.dirname(path), name), size)
        self._saved.restore(path, options=self._options)

    def _send(self, path: str, size: int) -> None:
        """Brings a file of the first process to the others."""
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
        """Writes one, removes the oldest, and returns its path."""
        if self._first is not None:
            self._first.save(number)
            self._latest = self._first.latest
        else:
            with tempfile.TemporaryDirectory("-replicator") as folder:
                self._saved.write(os.path.join(folder, "dropped"), self._options)
        # Nobody goes on before it is there: who fails then can go on from it.
        self._latest = self._peers.exchange(_SAVES, self._latest)[0]
        return str(self._latest)


def _parts(path: str) -> str:
    """Returns the pattern of the names of a checkpoint's files."""
    return f"{os.path.basename(path)}.*"


def files(
    peers: Peers | None,
    saved: tf.train.Checkpoint,
    directory: str,
    keep: int,
    options: tf.train.CheckpointOptions,
) -> Files:
    """Returns the checkpoints of this process, or of all that run the program.

    Args:
        peers: The processes; None: there is this one.
        saved: What they hold.
        directory: Where they are.
        keep: How many there are at most.
        options: How they are read and written.
    """
    if peers is None:
        return Alone(saved, directory, keep, options)
    return Together(peers, saved, directory, keep, options)


class Asked:
    """Whether a training was asked to stop: by a signal, to any of its processes.

    Processes tell one another about twice a second, after a number of steps on which
    they agreed before: a step is the same for all.

    Args:
        peers: The processes; None: there is this one.
        step: How many steps are done.
    """

    def __init__(self, peers: Peers | None, step: int) -> None:
        self._peers = peers
        self._before, self._next = step, step + 1
        self._since = time.monotonic()

    def stops(self, step: int, came: bool) -> bool:
        """Returns whether to stop after a step.

        Args:
            step: How many steps are done.
            came: Whether this process was asked to.
        """
        if self._peers is None:
            return came
        if step < self._next:
            return False
        now = time.monotonic()
        each = (now - self._since) / (step - self._before)
        self._before, self._since = step, now
        due = step + max(1, min(_MOST_STEPS, round(_SECONDS / max(each, 1e-9))))
        told = self._peers.exchange("counts steps", [came, due])
        self._next = told[0][1]
        return any(stops for stops, _ in told)
