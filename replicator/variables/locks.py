# SPDX-License-Identifier: Apache-2.0
"""Serializes the steps of a Replicator across threads.

Building or running a step takes the same lock as assigning to a variable, so the writes
of different threads do not interleave: every component receives all of them in one
order. Reads take no lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from replicator import errors
from replicator._tf import python

_PATIENCE = 60.0  # seconds


class StepLock:
    """Held while a step is built, while it runs eagerly, and during an assignment.

    The lock is reentrant. A thread that TensorFlow starts inside the step that holds it
    would wait forever, so it gets an error instead.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            if python.python_call() is not None:
                raise errors.ContextError(
                    "a py_function or a generator that TensorFlow runs would have to "
                    "wait for a step of this Replicator, which may be waiting for it.",
                    fix="assign to replicated variables, and run steps, between the "
                    "steps; in a step, assign in step_fn itself.",
                )
            self._lock.acquire()

    def __exit__(self, *about: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def also_held(self) -> Iterator[None]:
        """Holds the lock in a thread that already holds another one.

        Raises:
            ContextError: The lock's holder seems to be waiting for that other lock.
        """
        if not self._lock.acquire(timeout=_PATIENCE):
            raise errors.ContextError(
                "two Replicators build steps at the same time, and each has to change "
                "variables that the other one uses.",
                fix='build the steps in one thread, or use variables="mirrored".',
            )
        try:
            yield
        finally:
            self._lock.release()
