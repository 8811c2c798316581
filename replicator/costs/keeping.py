# SPDX-License-Identifier: Apache-2.0
"""What a step costs for one variable: its gradient's way, its update, its readers.

By the model of rates.py, whose constants are all there are: what is counted here are
ops, messages and bytes. On devices that share cores, work adds up, and values are read
where they are; on others, what counts is the longest chain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from replicator.costs import cost, hosts, rates
from replicator.costs.rates import Calibration, Rates, Work


@dataclasses.dataclass(frozen=True)
class Load:
    """What a step does with a variable, or with a part of it.

    Attributes:
        nbytes: Its size.
        slots: How many numbers an optimizer keeps for each of the variable's.
        rows: Of a sparse gradient, what share of the rows a replica's has; None: the
            gradient is dense.
    """

    nbytes: int
    slots: int = 2
    rows: float | None = None

    @property
    def travels(self) -> int:
        """How many bytes the gradient of a replica has."""
        if self.rows is None:
            return self.nbytes
        return min(self.nbytes, math.ceil(self.rows * self.nbytes))

    def update(self, replicas: int) -> Work:
        """Returns the work of one update: it reads gradient, variable and slots.

        Args:
            replicas: Of how many the gradient is.
        """
        touched = self.nbytes
        if self.rows is not None:
            touched = min(self.nbytes, replicas * self.travels)
        return Work(ops=2 + self.slots, added=(2 + self.slots) * touched)


def mirrored(
    load: Load,
    devices: Sequence[str],
    calibration: Calibration,
    algorithm: str | None = None,
) -> float:
    """Returns the seconds for a variable that all replicas have, and all update.

    Args:
        load: The variable.
        devices: Where the replicas run, by full names.
        calibration: What work costs.
        algorithm: How its gradients are reduced; None: the cheapest way.
    """
    update = _by_each(load.update(len(devices)), devices, calibration)
    if len(devices) == 1:
        return update
    if load.rows is not None:
        return update + _in_levels(_gathered, load, devices, calibration)
    names = [algorithm] if algorithm else _able(devices, calibration)
    # A small tensor waits for a message with others, and pays its share of it.
    alone = cost.filled(load.nbytes)
    reduced = []
    for name in names:
        message = all_reduce(name, 0, devices, calibration)
        all_of_it = all_reduce(name, load.nbytes, devices, calibration)
        reduced.append(all_of_it - (1 - alone) * message)
    return update + min(reduced)


def owned(
    load: Load,
    devices: Sequence[str],
    owner: str,
    calibration: Calibration,
    copies: bool = False,
) -> float:
    """Returns the seconds for a variable that is on one device, and updated there.

    Args:
        load: The variable.
        devices: Where the replicas run, by full names.
        owner: Where the variable is.
        calibration: What work costs.
        copies: Whether each replica has a copy, refreshed after each update.
    """
    own = calibration.of(rates.kind_of([owner]))
    seconds = load.update(len(devices)).seconds(own)
    away = [name for name in devices if name != owner]
    if not away:
        return seconds
    seconds += _in_levels(_to_one, load, [*away, owner], calibration)
    if copies:
        refreshed = Work(ops=1, copied=load.nbytes)
        seconds += _by_each(refreshed, devices, calibration)
    read = load.nbytes if copies else load.travels
    return seconds + _reads(read, away, owner, calibration)


def in_parts(
    loads: Sequence[Load],
    owners: Sequence[str],
    devices: Sequence[str],
    calibration: Calibration,
) -> float:
    """Returns the seconds for a variable in parts, which all replicas read joined.

    Args:
        loads: The parts.
        owners: `owners[k]` is where part k is; "": all replicas have it.
        devices: Where the replicas run, by full names.
        calibration: What work costs.
    """
    apart = _within(devices, calibration)[0].apart or hosts.are_several(devices)
    busy: dict[str, float] = {}
    for load, owner in zip(loads, owners, strict=True):
        if owner:
            seconds = owned(load, devices, owner, calibration)
        else:
            seconds = mirrored(load, devices, calibration)
        busy[owner] = busy.get(owner, 0.0) + seconds
    everywhere = busy.pop("", 0.0)
    longest = max(busy.values(), default=0.0)
    total = everywhere + (longest if apart else sum(busy.values()))
    # Each replica joins the parts, and cuts its gradient.
    travels = sum(load.travels for load in loads)
    joins = Work(ops=1 + len(loads), copied=2 * travels)
    return total + _by_each(joins, devices, calibration)


def all_reduce(
    algorithm: str, nbytes: int, devices: Sequence[str], calibration: Calibration
) -> float:
    """Returns how long an all_reduce takes: in two levels, where hosts have several.

    Args:
        algorithm: One of cost.ALGORITHM_NAMES.
        nbytes: The size of each replica's tensor.
        devices: Where the replicas run, by full names.
        calibration: What work costs.
    """
    if not hosts.in_levels(devices):
        kind = rates.kind_of(devices)
        return calibration.seconds(algorithm, kind, len(devices), nbytes)
    members = hosts.by_host(devices)
    most = max(members, key=len)
    within = rates.kind_of([devices[n] for n in most])
    return calibration.seconds_in_levels(
        algorithm, within, len(most), len(members), nbytes
    )


def _able(devices: Sequence[str], calibration: Calibration) -> list[str]:
    """Returns the algorithms that may be taken unasked; see `cost.choose`."""
    nccl = rates.are_gpus(devices) and "gpu" in calibration.rates
    return [name for name in cost.ALGORITHM_NAMES if name != "nccl" or nccl]


def _to_one(replicas: int, nbytes: int, load: Load) -> Work:
    """Returns the work of reducing gradients on one device."""
    messages, total = replicas - 1, replicas * nbytes
    dense = load.rows is None
    return Work(
        ops=1,
        messages=messages,
        sent=messages * nbytes,
        added=total if dense else 0,
        copied=0 if dense else total,
    )


def _gathered(replicas: int, nbytes: int, load: Load) -> Work:
    """Returns the work of joining rows on one device, which hands them to all."""
    joined = _to_one(replicas, nbytes, load)
    messages = replicas - 1
    return dataclasses.replace(
        joined,
        messages=2 * messages,
        sent=joined.sent + messages * replicas * nbytes,
    )


def _in_levels(
    way: Callable[[int, int, Load], Work],
    load: Load,
    devices: Sequence[str],
    calibration: Calibration,
) -> float:
    """Returns the seconds of what goes through one device, within hosts, then between.

    What is small waits for a message with others, and pays its share of it.
    """
    members = hosts.by_host(devices)
    most = [devices[n] for n in max(members, key=len)]
    levels = [(len(most), rates.kind_of(most)), (len(members), "hosts")]
    nbytes, seconds = load.travels, 0.0
    for count, kind in levels:
        if count > 1:
            work = way(count, nbytes, load)
            share = cost.filled(nbytes)
            work = dataclasses.replace(
                work, ops=share * work.ops, messages=share * work.messages
            )
            seconds += work.seconds(calibration.of(kind))
            if load.rows is not None:
                nbytes = min(load.nbytes, count * nbytes)
    return seconds


def _reads(
    nbytes: int, away: Sequence[str], owner: str, calibration: Calibration
) -> float:
    """Returns the seconds in which a value reaches those who are elsewhere."""
    near = [name for name in away if hosts.host_of(name) == hosts.host_of(owner)]
    far = len(away) - len(near)
    seconds = Work(messages=far, sent=far * nbytes).seconds(calibration.of("hosts"))
    if not near or cost.share_memory([*near, owner]):
        return seconds  # read where it is
    kind = rates.kind_of([*near, owner])
    work = Work(messages=len(near), sent=len(near) * nbytes)
    return seconds + work.seconds(calibration.of(kind))


def _within(devices: Sequence[str], calibration: Calibration) -> tuple[Rates, int]:
    """Returns the rates of the host with the most replicas, and how many it has."""
    members = max(hosts.by_host(devices), key=len)
    kind = rates.kind_of([devices[n] for n in members])
    return calibration.of(kind), len(members)


def _by_each(work: Work, devices: Sequence[str], calibration: Calibration) -> float:
    """Returns the seconds of work that each replica does."""
    own, count = _within(devices, calibration)
    return work.seconds(own) * (1 if own.apart else count)
