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
        compute: What the replicas compute, in seconds of the step.
        communication: The same of each communication.
        rows: The communications.
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

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return len(self.devices)

    @property
    def communicated(self) -> float:
        """What all communications take, in seconds of the step."""
        return sum(self.communication)


def split(
    ran: Iterable[Ran], rows: Sequence[Row], seconds: float, shared: bool
) -> tuple[float, tuple[float, ...]]:
    """Returns what the replicas' own work takes of a step, and each communication.

    On cores that all share, a second of the step belongs to what kept them busy; so the
    step is divided as the time is that its ops took. On devices that work at the same
    time, a communication takes what it does on the device that is longest at it.

    Args:
        ran: What ran in one or several steps.
        rows: The communications.
        seconds: What there is to divide: a step.
        shared: Whether the replicas share cores.
    """
    busy: dict[tuple[int | None, str], float] = {}
    for op in ran:
        key = op.row, op.plane
        busy[key] = busy.get(key, 0.0) + op.own
    own = [
        [took for (row, _), took in busy.items() if row == number]
        for number in range(len(rows))
    ]
    if shared:
        total = sum(busy.values())
        shares = [sum(each) / total if total else 0.0 for each in own]
    else:
        longest = {plane for _, plane in busy}
        most = max(
            (sum(t for (_, p), t in busy.items() if p == plane) for plane in longest),
            default=0.0,
        )
        shares = [max(each, default=0.0) / most if most else 0.0 for each in own]
    communication = tuple(share * seconds for share in shares)
    return max(0.0, seconds - sum(communication)), communication
