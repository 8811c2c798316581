# SPDX-License-Identifier: Apache-2.0
"""Temporary folders that are always removed, even if a program is killed.

The owner of a folder holds a lock on a file in it, which ends with the owner. Creating
a folder removes those whose locks are free. Uses the standard library only, as the
launcher sends it to other hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
import weakref
from types import TracebackType

_PREFIX, _LOCK = "replicator-", ".replicator-lock"


class Folder:
    """A folder for this process, which is removed at its end, or by a later one.

    Attributes:
        path: The folder's path.
    """

    def __init__(self) -> None:
        sweep()
        self.path, lock = _make()
        self._remove = weakref.finalize(self, _remove, self.path, lock)

    def __enter__(self) -> str:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()


def sweep() -> None:
    """Removes the folders of this user whose owners have ended."""
    for path in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # not such a folder, or owned
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _make() -> tuple[str, int]:
    """Creates a folder; returns its path, and the descriptor of its lock."""
    path = tempfile.mkdtemp(prefix=_PREFIX)
    new = os.path.join(path, f"{_LOCK}.new")
    lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(new, os.path.join(path, _LOCK))  # those who sweep see it locked
    return path, lock


def _remove(path: str, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


if __name__ == "__main__":
    # It has no lock, and so is not swept, before the relay of its server holds it.
    sweep()
    print("\n" + tempfile.mkdtemp(prefix=_PREFIX))
