# SPDX-License-Identifier: Apache-2.0
"""The cost of a variable in a step: reducing its gradient, updating it and reading it.

By the model and the constants of rates.py; this module counts the ops, messages and
bytes. On devices that share cores all work adds up, and values are read in place; on
others the longest chain counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from replicator.costs import cost, hosts, rates
from replicator.costs.rates import Calibration, Rates, Work


@dataclasses.dataclass(frozen=True)
class Load:
    """What a step does with a variable, or with a part of one.

    Attributes:
        nbytes: Its size.
        slots: How many values an optimizer keeps per element of the variable.
        rows: For a sparse gradient, the share of the rows that a replica's gradient
            has; None: the gradient is dense.
        shared_nbytes: The size of all gradients that may share messages, this one
            included; None: enough to fill a message.
    """

    nbytes: int
    slots: int = 2
    rows: float | None = None
    shared_nbytes: int | None = None

    @property
    def travels(self) -> int:
        """The size of a replica's gradient in bytes."""
        if self.rows is None:
            return self.nbytes
        return min(self.nbytes, math.ceil(self.rows * self.nbytes))

    def update(self, replicas: int) -> Work:
        """Returns the work of one update, which reads gradient, variable and slots.

        Args:
            replicas: The number of replicas whose gradients are combined.
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
    """Returns the seconds for a variable that all replicas hold and update.

    Args:
        load: The variable.
        devices: The replicas' devices, by full names.
        calibration: The costs of work.
        algorithm: How its gradients are reduced; None: the cheapest way.
    """
    update = _on_all(load.update(len(devices)), devices, calibration)
    if len(devices) == 1:
        return update
    if load.rows is not None:
        return update + _in_levels(_gathered, load, devices, calibration)
    names = [algorithm] if algorithm else _able(devices, calibration)
    # Small tensors share a message: each pays its part, and all of them at least one.
    fill = cost.filled(load.nbytes, load.shared_nbytes)
    costs = []
    for name in names:
        message = all_reduce(name, 0, devices, calibration)
        whole = all_reduce(name, load.nbytes, devices, calibration)
        costs.append(whole - (1 - fill) * message)
    return update + min(costs)


def owned(
    load: Load,
    devices: Sequence[str],
    owner: str,
    calibration: Calibration,
    copies: bool = False,
) -> float:
    """Returns the seconds for a variable that one device holds and updates.

    Args:
        load: The variable.
        devices: The replicas' devices, by full names.
        owner: The variable's device.
        calibration: The costs of work.
        copies: Whether each replica has a copy, refreshed after each update.
    """
    owner_rates = calibration.of(rates.kind_of([owner]))
    seconds = load.update(len(devices)).seconds(owner_rates)
    others = [name for name in devices if name != owner]
    if not others:
        return seconds
    seconds += _in_levels(_to_one, load, [*others, owner], calibration)
    if copies:
        refresh = Work(ops=1, copied=load.nbytes)
        seconds += _on_all(refresh, devices, calibration)
    read = load.nbytes if copies else load.travels
    return seconds + _reads(read, others, owner, calibration)


def in_parts(
    loads: Sequence[Load],
    owners: Sequence[str],
    devices: Sequence[str],
    calibration: Calibration,
) -> float:
    """Returns the seconds for a partitioned variable, which all replicas read whole.

    Args:
        loads: The parts.
        owners: `owners[k]` is the device of part k; "": all replicas hold it.
        devices: The replicas' devices, by full names.
        calibration: The costs of work.
    """
    host_rates, _ = _largest_host(devices, calibration)
    in_parallel = host_rates.apart or hosts.are_several(devices)
    seconds_of: dict[str, float] = {}
    for load, owner in zip(loads, owners, strict=True):
        if owner:
            seconds = owned(load, devices, owner, calibration)
        else:
            seconds = mirrored(load, devices, calibration)
        seconds_of[owner] = seconds_of.get(owner, 0.0) + seconds
    mirrored_seconds = seconds_of.pop("", 0.0)
    longest = max(seconds_of.values(), default=0.0)
    total = mirrored_seconds + (longest if in_parallel else sum(seconds_of.values()))
    # Each replica concatenates the parts, and splits its gradient.
    travels = sum(load.travels for load in loads)
    joins = Work(ops=1 + len(loads), copied=2 * travels)
    return total + _on_all(joins, devices, calibration)


def all_reduce(
    algorithm: str, nbytes: int, devices: Sequence[str], calibration: Calibration
) -> float:
    """Returns the seconds of an all_reduce, in two levels where hosts have several.

    Args:
        algorithm: One of cost.ALGORITHM_NAMES.
        nbytes: The size of each replica's tensor.
        devices: The replicas' devices, by full names.
        calibration: The costs of work.
    """
    if not hosts.in_levels(devices):
        kind = rates.kind_of(devices)
        return calibration.seconds(algorithm, kind, len(devices), nbytes)
    members = hosts.by_host(devices)
    largest = max(members, key=len)
    kind = rates.kind_of([devices[n] for n in largest])
    return calibration.seconds_in_levels(
        algorithm, kind, len(largest), len(members), nbytes
    )


def _able(devices: Sequence[str], calibration: Calibration) -> list[str]:
    """Returns the algorithms that may be chosen unrequested; see `cost.choose`."""
    nccl = rates.nccl_reaches(devices) and "gpu" in calibration.rates
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
    """Returns the work of concatenating rows on one device, for all replicas."""
    joined = _to_one(replicas, nbytes, load)
    messages = replicas - 1
    return dataclasses.replace(
        joined,
        messages=2 * messages,
        sent=joined.sent + messages * replicas * nbytes,
    )


def _in_levels(
    work_of: Callable[[int, int, Load], Work],
    load: Load,
    devices: Sequence[str],
    calibration: Calibration,
) -> float:
    """Returns the seconds of work done on one device, within hosts, then between them.

    Small tensors share a message: each pays its part, and all of them at least one.
    """
    members = hosts.by_host(devices)
    largest = [devices[n] for n in max(members, key=len)]
    levels = [(len(largest), rates.kind_of(largest)), (len(members), "hosts")]
    nbytes, seconds = load.travels, 0.0
    part = cost.filled(nbytes, load.shared_nbytes)  # at least, if fewer share messages
    for count, kind in levels:
        if count > 1:
            work = work_of(count, nbytes, load)
            share = max(part, cost.filled(nbytes))
            work = dataclasses.replace(
                work, ops=share * work.ops, messages=share * work.messages
            )
            seconds += work.seconds(calibration.of(kind))
            if load.rows is not None:
                nbytes = min(load.nbytes, count * nbytes)
    return seconds


def _reads(
    nbytes: int, readers: Sequence[str], owner: str, calibration: Calibration
) -> float:
    """Returns the seconds in which a value reaches the replicas on other devices."""
    near = [name for name in readers if hosts.host_of(name) == hosts.host_of(owner)]
    far = len(readers) - len(near)
    seconds = Work(messages=far, sent=far * nbytes).seconds(calibration.of("hosts"))
    if not near or cost.share_memory([*near, owner]):
        return seconds  # read where it is
    kind = rates.kind_of([*near, owner])
    work = Work(messages=len(near), sent=len(near) * nbytes)
    return seconds + work.seconds(calibration.of(kind))


def _largest_host(
    devices: Sequence[str], calibration: Calibration
) -> tuple[Rates, int]:
    """Returns the rates of the host with the most replicas, and their number."""
    members = max(hosts.by_host(devices), key=len)
    kind = rates.kind_of([devices[n] for n in members])
    return calibration.of(kind), len(members)


def _on_all(work: Work, devices: Sequence[str], calibration: Calibration) -> float:
    """Returns the seconds of work that every replica does."""
    host_rates, count = _largest_host(devices, calibration)
    return work.seconds(host_rates) * (1 if host_rates.apart else count)
