# SPDX-License-Identifier: Apache-2.0
"""Detects processes that do different things and would wait for each other forever.

Processes exchange what they build before it runs, but not what they run, since that
would cost time in every step. A process that runs one step, while another runs a
different step or waits for an exchange, would hang in a collective. So a process that
waits for long publishes its place in the program, and looks for another process at a
place where the two can never meet.

A place is a pair of numbers: the exchanges so far, and the steps begun in which all
processes communicate. Equal places have equal numbers in all processes.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from replicator import errors
from replicator._tf import cluster
from replicator.cluster import watch

_LONG = 0.5  # seconds that an activity takes before this process looks at others
_QUICK = 0.05  # seconds for the store to answer
_GRACE = 2.0  # seconds for the others to find the clash, too
_STEP, _TALK = "runs", "waits"
_FIX = (
    "run the same steps on every host, in the same order; all processes must be "
    "restarted."
)


class _Activity(NamedTuple):
    """The current activity of a process.

    Attributes:
        kind: `_STEP` if it runs a step, `_TALK` if it waits for an exchange.
        step_key: Identifies the step.
        text: Describes both for messages, with the user's line.
        since: When the activity began.
        place: The place in the program; see the module's docstring.
    """

    kind: str
    step_key: int
    text: str
    since: float
    place: tuple[int, int]


class ActivityMonitor(threading.Thread):
    """Tracks what this process does, and publishes it if it takes long.

    Args:
        process: The number of this process.
        names: The names of all processes, for messages.
    """

    def __init__(self, process: int, names: list[str]) -> None:
        super().__init__(name="replicator looks for clashes", daemon=True)
        self._process, self._names, self._token = process, names, watch.current()
        self._exchanges = self._steps = 0
        self._usual = 0.0  # seconds of the longest step so far
        self._activity: _Activity | None = None
        self._published: tuple[int, int] | None = None
        self._clash: errors.MismatchError | None = None

    @contextlib.contextmanager
    def running(self, step_key: int, text: str) -> Iterator[None]:
        """Marks a block in which a step of all processes runs."""
        self._steps += 1
        place, since = (self._exchanges, self._steps), time.monotonic()
        self._activity = _Activity(_STEP, step_key, text, since, place)
        try:
            yield
            self._usual = max(self._usual, time.monotonic() - since)
        finally:
            self._activity = None

    def tracked(
        self, run: Callable[[], Any], function: Any, text: str
    ) -> Callable[[], Any]:
        """Wraps the run of a traced step to record that it is running.

        Args:
            run: Runs it.
            function: The traced step.
            text: Describes the run, for messages.
        """
        step_key = key_of_all(function, len(self._names))
        if step_key is None:
            return run

        def call() -> Any:
            with self.running(step_key, text):
                return run()

        return call

    def next_number(self) -> int:
        """Returns the number of this process's next exchange, equal in all."""
        self._exchanges += 1
        return self._exchanges - 1

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Marks a block in which this process waits for an exchange.

        Raises:
            MismatchError: The block failed since the processes can never meet.
        """
        place = (self._exchanges, self._steps)
        self._activity = _Activity(_TALK, 0, text, time.monotonic(), place)
        try:
            yield
        except tf.errors.OpError:
            self.check()  # the store ends with the first process
            raise
        finally:
            self._activity = None

    def check(self) -> None:
        """Raises MismatchError if this process and another can never meet."""
        if self._clash is not None:
            raise self._clash

    def run(self) -> None:
        """Looks for clashes at intervals, until one is found or the process ends."""
        while watch.current() is self._token and self._clash is None:
            time.sleep(_LONG / 2)
            activity = self._activity
            if activity is None:
                continue
            usual = self._usual if activity.kind == _STEP else 0.0
            if time.monotonic() - activity.since > max(_LONG, 2 * usual):
                with contextlib.suppress(tf.errors.OpError):
                    self._look(activity)

    def _look(self, activity: _Activity) -> None:
        if self._published != activity.place:
            if self._published is not None:
                cluster.store_delete(_key(self._published, self._process))
            self._published = activity.place
            cluster.store_put(_key(activity.place, self._process), json.dumps(activity))
        for process, name in enumerate(self._names):
            for place in _rivals(activity) if process != self._process else ():
                text = cluster.store_get(_key(place, process), _QUICK)
                rival = None if text is None else _Activity(*json.loads(text))
                if (
                    rival is not None
                    and _clash(activity, rival)
                    and self._activity is activity
                ):
                    self._give_up(activity, name, rival)
                    return

    def _give_up(self, activity: _Activity, name: str, rival: _Activity) -> None:
        self._clash = errors.MismatchError(
            "the hosts do different things, and would wait for one another forever.",
            [
                f"{self._names[self._process]}: {activity.text}",
                f"{name}: {rival.text}",
            ],
            _FIX,
        )
        with contextlib.suppress(tf.errors.OpError):
            self._wait_for_others()
        cluster.abort_collectives("the hosts do different things")

    def _wait_for_others(self) -> None:
        """Waits until the others have found the clash, too.

        Otherwise, those that look a moment later would report this process as lost: it
        ends with the error, and the first process takes the store with it.
        """
        cluster.store_put(_found_key(self._process), "")
        deadline = time.monotonic() + _GRACE
        for process in range(len(self._names)):
            cluster.store_get(_found_key(process), deadline - time.monotonic())


def _rivals(activity: _Activity) -> list[tuple[int, int]]:
    """Returns the places at which another process can never meet this one."""
    exchanges, steps = activity.place
    if activity.kind == _TALK:
        return [(exchanges - 1, steps + 1)]
    return [(exchanges, steps), (exchanges + 1, steps - 1)]


def _clash(activity: _Activity, rival: _Activity) -> bool:
    if activity.kind == rival.kind:
        return activity.kind == _STEP and activity.step_key != rival.step_key
    return list(activity.place) != list(rival.place)


def _key(place: tuple[int, int], process: int) -> str:
    return f"replicator/doing/{place[0]}/{place[1]}/{process}"


def _found_key(process: int) -> str:
    return f"replicator/clash/{process}"


def monitor(process: int, names: list[str]) -> ActivityMonitor:
    """Returns this process's monitor; starts it if there is none."""
    for thread in threading.enumerate():
        if isinstance(thread, ActivityMonitor):
            return thread
    activity_monitor = ActivityMonitor(process, names)
    activity_monitor.start()
    return activity_monitor


def key_of_all(function: Any, count: int) -> int | None:
    """Returns the key that identifies a step of all processes; None for other steps.

    The key is the instance key of its first collective of all processes.

    Args:
        function: A traced step.
        count: The number of processes.
    """
    for op in function.graph.get_operations():
        if op.type.startswith("Collective") and len(op.inputs) > _KEY:
            sizes = [tf.get_static_value(op.inputs[k]) for k in (_SIZE, _KEY)]
            if sizes[0] == count and sizes[1] is not None:
                return int(sizes[1])
    return None


_SIZE, _KEY = 1, 3  # inputs of collective ops: the group size and the instance key
