# SPDX-License-Identifier: Apache-2.0
"""The last checkpoints of a run, some of which may be damaged."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf


class Checkpoints:
    """The last checkpoints of a run, each of another step and written once.

    TensorFlow renames a checkpoint's two files one after the other, the index last: a
    checkpoint with an index is complete, unless it was damaged later.

    Args:
        folder: The folder of the checkpoints.
        parts: The contents of each checkpoint, by name.
    """

    KEPT = 3

    def __init__(self, folder: Path, parts: Mapping[str, Any]) -> None:
        self._folder = folder
        self._checkpoint = tf.train.Checkpoint(**parts)
        self._manager: tf.train.CheckpointManager | None = None

    def found(self) -> list[str]:
        """Returns the names of the checkpoints on disk, the newest first."""
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
        """Prepares for saving.

        Args:
            known: The checkpoints that count as the last ones, the newest first. Others
                may be overwritten, and are not deleted.
        """
        if known:
            with _without_deprecations():
                tf.compat.v1.train.update_checkpoint_state(
                    str(self._folder), known[0], list(reversed(known))
                )
        else:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, str(self._folder), self.KEPT
        )

    def save(self, step: int) -> None:
        """Saves all parts, unless that was done at this step.

        Raises:
            OSError, tf.errors.OpError: It could not be written; no files remain of it.
        """
        assert self._manager is not None, "begin comes first"
        latest = self._manager.latest_checkpoint
        if latest is not None and latest.endswith(f"-{step}"):
            return
        try:
            self._manager.save(checkpoint_number=step)
        except (OSError, tf.errors.OpError):
            self._clean()
            raise

    def _clean(self) -> None:
        """Deletes the files of a failed attempt to save."""
        for path in self._folder.glob("*temp*"):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def _without_deprecations() -> Iterator[None]:
    """Keeps TensorFlow from calling deprecated what it has no other function for."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)
