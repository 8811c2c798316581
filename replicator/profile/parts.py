# SPDX-License-Identifier: Apache-2.0
"""What the parts of a step take: its replicas, and each communication. Pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from replicator.plan.rows import Row
from replicator.profile.traces import Ran


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a step. Its parts add up to `step`.

    Attributes:
        devices: `devices[r]` is where replica r runs.
        cores: How many cores the replicas share; None if each has a device of its own.
        step: The seconds of a step.
        alone: The seconds of a step of one replica with the batch that each has.
        work: What of that all cores together are busy, in seconds.
        fixed: What a step takes before and after anything is computed, in seconds.
        compute: What the replicas compute, each its own, in seconds of the step.
        communication: The same of each communication.
        rows: The communications.
        once: What one replica computes for all, however many there are: the update of
            a variable that one owns; in seconds of the step.
        busy: What share of the cores' time in a step they are busy.
        spread: By what share of `step` half of all steps took longer than it.
    """

    devices: tuple[str, ...]
    cores: int | None
    step: float
    alone: float
    work: float
    fixed: float
    compute: float
    communication: tuple[float, ...]
    rows: tuple[Row, ...]
    once: float = 0.0
    busy: float = 1.0
    spread: float = 0.0

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return len(self.devices)

    @property
    def communicated(self) -> float:
        """What all communications take, in seconds of the step."""
        return sum(self.communication)


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a step is divided into, in seconds; see Measured."""

    compute: float
    once: float
    communication: tuple[float, ...]


def split(
    ran: Sequence[Ran], rows: Sequence[Row], seconds: float, shared: bool
) -> Parts:
    """Divides a step.

    On cores that all share, a second of the step belongs to what kept them busy: ops
    that run at the same time share it, and what no op is shown for is divided as the
    rest. On devices that work at the same time, a communication takes what it does on
    the device that is longest at it, and nobody computes for others.

    Args:
        ran: What ran in one or several steps.
        rows: The communications.
        seconds: What there is to divide: a step.
        shared: Whether the replicas share cores.
    """
    if shared:
        once, *own = _of_shared(ran, len(rows))
    else:
        once, own = 0.0, _of_longest(ran, len(rows))
    communication = tuple(share * seconds for share in own)
    once *= seconds
    return Parts(max(0.0, seconds - once - sum(communication)), once, communication)


def _of_shared(ran: Sequence[Ran], count: int) -> list[float]:
    """Returns what share of the time is for all, and for each communication."""
    times = [0.0] * (1 + count)
    total = 0.0
    for op, took in zip(ran, taken(ran), strict=True):
        total += took
        if op.row is not None:
            times[1 + op.row] += took
        elif op.once:
            times[0] += took
    return [took / total if total else 0.0 for took in times]


def _of_longest(ran: Iterable[Ran], count: int) -> list[float]:
    """Returns what share of a device's time each communication takes."""
    busy: dict[tuple[int | None, str], float] = {}
    planes: dict[str, float] = {}
    for op in ran:
        key = op.row, op.plane
        busy[key] = busy.get(key, 0.0) + op.own
        planes[op.plane] = planes.get(op.plane, 0.0) + op.own
    most = max(planes.values(), default=0.0)
    longest = [
        max((took for (row, _), took in busy.items() if row == n), default=0.0)
        for n in range(count)
    ]
    return [took / most if most else 0.0 for took in longest]


def taken(ran: Sequence[Ran]) -> list[float]:
    """Returns what each op takes of the time in which any runs.

    Ops that run at the same time share it, however many cores each of them uses: a
    product on all cores takes as much as two on one core each, for as long. Of ops
    inside one another, on one thread, the innermost runs.

    Args:
        ran: What ran.
    """
    changes = sorted(
        change
        for n, op in enumerate(ran)
        if op.seconds > 0
        for change in (
            (op.start, 1, -op.seconds, n),
            (op.start + op.seconds, 0, 0.0, n),
        )
    )
    took = [0.0] * len(ran)
    threads: dict[tuple[str, int], list[int]] = {}
    last = 0.0
    for now, begins, _, n in changes:
        running = [inside[-1] for inside in threads.values() if inside]
        for one in running:
            took[one] += (now - last) / len(running)
        last = now
        inside = threads.setdefault((ran[n].plane, ran[n].thread), [])
        if begins:
            inside.append(n)
        else:
            inside.remove(n)
    return took
