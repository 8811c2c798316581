# SPDX-License-Identifier: Apache-2.0
"""The parts of a step's time: its replicas and each communication. Pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from replicator.profile.traces import Ran
from replicator.report.rows import Row


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurement of a step. Its parts add up to `step`.

    Attributes:
        devices: `devices[r]` is where replica r runs.
        cores: The number of cores that the replicas share; None if each has a device.
        step: The seconds of a step.
        alone: The seconds of a step of one replica with the same batch per replica; 0
            if the program needs all of its replicas.
        work: The seconds of processor time of that step, summed over all cores.
        fixed: The seconds of a step before and after any computation.
        compute: The seconds of the step for the replicas' own computation.
        communication: The seconds of the step for each communication.
        rows: The communications.
        once: The seconds of the step for work that one replica does for all, whatever
            their number: the update of a variable that it owns.
        busy: The fraction of the cores' time in a step in which they are busy.
        spread: The fraction of `step` by which half of all steps exceeded it.
        needs_all: Why the program fails with one replica; "" if it runs.
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
    needs_all: str = ""

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return len(self.devices)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a step, in seconds; see Measured."""

    compute: float
    once: float
    communication: tuple[float, ...]


def split(
    ran: Sequence[Ran], rows: Sequence[Row], seconds: float, shared: bool
) -> Parts:
    """Divides the time of a step among its parts.

    On shared cores, a second of the step belongs to the ops that kept them busy:
    simultaneous ops share it, and time without any traced op is divided in the same
    proportions. On devices that work in parallel, a communication takes its time on the
    device that spends longest on it, and no replica works for others.

    Args:
        ran: The ops that ran in one or several steps.
        rows: The communications.
        seconds: The time to divide: that of a step.
        shared: Whether the replicas share cores.
    """
    if shared:
        for_all, *shares = _of_shared(ran, len(rows))
    else:
        for_all, shares = 0.0, _of_longest(ran, len(rows))
    communication = tuple(share * seconds for share in shares)
    for_all *= seconds
    return Parts(
        max(0.0, seconds - for_all - sum(communication)), for_all, communication
    )


def _of_shared(ran: Sequence[Ran], count: int) -> list[float]:
    """Returns the fractions of time of work done for all and of each communication."""
    times = [0.0] * (1 + count)
    total = 0.0
    for op, took in zip(ran, seconds_by_op(ran), strict=True):
        total += took
        if op.row is not None:
            times[1 + op.row] += took
        elif op.once:
            times[0] += took
    return [took / total if total else 0.0 for took in times]


def _of_longest(ran: Iterable[Ran], count: int) -> list[float]:
    """Returns the fraction of a device's time that each communication takes."""
    busy: dict[tuple[int | None, str], float] = {}
    planes: dict[str, float] = {}
    for op in ran:
        key = op.row, op.plane
        busy[key] = busy.get(key, 0.0) + op.own_seconds
        planes[op.plane] = planes.get(op.plane, 0.0) + op.own_seconds
    most = max(planes.values(), default=0.0)
    longest = [
        max((took for (row, _), took in busy.items() if row == n), default=0.0)
        for n in range(count)
    ]
    return [took / most if most else 0.0 for took in longest]


def seconds_by_op(ran: Sequence[Ran]) -> list[float]:
    """Returns each op's share of the time in which any op runs, in seconds.

    Simultaneous ops share time equally, however many cores each of them uses: a product
    on all cores counts as much as two simultaneous ones on one core each. Of nested ops
    on one thread, the innermost runs.

    Args:
        ran: The ops that ran.
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
    seconds = [0.0] * len(ran)
    threads: dict[tuple[str, int], list[int]] = {}
    last = 0.0
    for time, begins, _, n in changes:
        running = [stack[-1] for stack in threads.values() if stack]
        for running_op in running:
            seconds[running_op] += (time - last) / len(running)
        last = time
        stack = threads.setdefault((ran[n].plane, ran[n].thread), [])
        if begins:
            stack.append(n)
        else:
            stack.remove(n)
    return seconds
