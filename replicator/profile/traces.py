# SPDX-License-Identifier: Apache-2.0
"""Traces steps: the ops that ran, each with its communication and replica."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence

import tensorflow as tf

from replicator._tf import profiles
from replicator.graph.passes import once as once_for_all
from replicator.report.rows import Row

_OP = re.compile(r"([^:\s]+):([A-Za-z_]\w*)")
# A function that is called several times has the scope more than once, numbered.
_SCOPE = re.compile(r"(?:^|/)(communicate/[a-z_]+/[0-9.]+)(?:_\d+)?(?:/|$)")


@dataclasses.dataclass(frozen=True)
class Ran:
    """An op that ran in a traced step.

    Attributes:
        name: The op's name.
        type: Its type, e.g. "MatMul".
        plane: The device: "/host:CPU", "/device:GPU:0".
        thread: The thread or stream of the device.
        start: Its start, in seconds since an arbitrary point.
        seconds: Its duration.
        own_seconds: Its duration without that of ops nested in it, in seconds.
        row: The number of the communication that it is part of; None if of none.
        replica_id: The replica that it belongs to; None if to none, or to all.
        once: Whether that replica runs it for all.
    """

    name: str
    type: str
    plane: str
    thread: int
    start: float
    seconds: float
    own_seconds: float
    row: int | None = None
    replica_id: int | None = None
    once: bool = False


def trace(
    run: Callable[[], object],
    rows: Sequence[Row],
    count: int,
    ops_for_all: Collection[str] = (),
) -> list[Ran]:
    """Runs steps under TensorFlow's profiler, and returns the ops that ran.

    Args:
        run: Runs a step, and returns when it has completed.
        rows: The step's communications.
        count: The number of steps.
        ops_for_all: The names of ops that one replica runs for all.
    """
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=2, python_tracer_level=0
    )
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, options)
        try:
            for _ in range(count):
                run()
        finally:
            tf.profiler.experimental.stop()
        files = pathlib.Path(folder).rglob("*.xplane.pb")
        events = [e for file in files for e in profiles.read_profile(file.read_bytes())]
    return ops_of(events, rows, ops_for_all)


def ops_of(
    events: Iterable[profiles.ProfileEvent],
    rows: Sequence[Row],
    ops_for_all: Collection[str] = (),
) -> list[Ran]:
    """Returns the ops among traced events, ordered by start.

    If the trace contains the kernels of GPUs, the host's ops that launch them are left
    out.

    Args:
        events: The traced events.
        rows: The step's communications.
        ops_for_all: The names of ops that one replica runs for all.
    """
    numbers = {row.scope: number for number, row in enumerate(rows)}
    threads: dict[tuple[str, int], list[profiles.ProfileEvent]] = {}
    for event in events:
        if _OP.fullmatch(event.name):
            threads.setdefault((event.plane, event.thread), []).append(event)
    kernels = {plane for plane, _ in threads if "/device:" in plane}
    ops = [
        _ran(event, own_seconds, numbers, ops_for_all)
        for (plane, _), line in threads.items()
        if not kernels or plane in kernels
        for event, own_seconds in _with_own_seconds(line)
    ]
    return sorted(ops, key=lambda ran: ran.start)


def _with_own_seconds(
    line: list[profiles.ProfileEvent],
) -> list[tuple[profiles.ProfileEvent, float]]:
    """Returns each event of a thread with its duration without nested events."""
    line.sort(key=lambda event: (event.start, -event.seconds))
    own_seconds = [event.seconds for event in line]
    around: list[int] = []
    for n, event in enumerate(line):
        while around and _end(line[around[-1]]) <= event.start:
            around.pop()
        if around:
            own_seconds[around[-1]] -= event.seconds
        around.append(n)
    return [
        (event, max(0.0, seconds))
        for event, seconds in zip(line, own_seconds, strict=True)
    ]


def _end(event: profiles.ProfileEvent) -> float:
    return event.start + event.seconds


def _ran(
    event: profiles.ProfileEvent,
    own_seconds: float,
    numbers: dict[str, int],
    ops_for_all: Collection[str],
) -> Ran:
    match = _OP.fullmatch(event.name)
    assert match, "only ops are asked for"
    name, kind = match.groups()
    scope, replica = _SCOPE.search(name), once_for_all.REPLICA.search(name)
    row = numbers.get(scope[1]) if scope else None
    return Ran(
        name=name,
        type=kind,
        plane=event.plane,
        thread=event.thread,
        start=event.start,
        seconds=event.seconds,
        own_seconds=own_seconds,
        row=row,
        replica_id=int(replica[1]) if replica else None,
        once=row is None and any(part in ops_for_all for part in _around(name)),
    )


def _around(name: str) -> list[str]:
    """Returns the name of an op, and those of its enclosing functions and loops.

    The name of an op in a body is prefixed by that of the op that runs the body; ops
    that TensorFlow adds to send an op's result are prefixed in the same way.
    """
    parts = name.split("/")
    return ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
