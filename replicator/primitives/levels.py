# SPDX-License-Identifier: Apache-2.0
"""Communication in two levels: within each host, and between hosts.

All devices of a host share its link to the others, and TensorFlow sends a tensor once
to each device that reads it. So where hosts have several replicas, what they pass
becomes one tensor on a device of their host (the leader), before that crosses the link;
and what comes to a host, its leader reads, and the others read it there. Each tensor,
or bucket, crosses from one host to another in one message, or in as many slices as the
algorithm between hosts makes of it.

Where a communication is on one host, or no host has several of its replicas, nothing
here adds an op: all of it is one level.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from replicator.costs import cost, hosts
from replicator.graph.lowering.matched import Matched
from replicator.primitives import arithmetic, axes

# `received[n]` are the parts of the result that participant n receives, on its device
# or to be read by it: the value, and for "argmin" and "argmax" the owner.
Received = list[list[tf.Tensor]]


def leaders(matched: Matched, hub: str, nbytes: int) -> list[int]:
    """Returns who communicates between hosts: a participant of each host.

    Args:
        matched: The communication.
        hub: The device that is to be one of them.
        nbytes: How much each will have to do.

    Returns:
        Places of participants; all of them, if there are no levels.
    """
    if not hosts.in_levels(matched.devices):
        return list(range(len(matched.devices)))
    return [
        matched.devices.index(leader(matched, members, hub, nbytes))
        for members in hosts.by_host(matched.devices)
    ]


def leader(matched: Matched, members: Sequence[int], hub: str, nbytes: int) -> str:
    """Returns the device of one host that works for it: the hub, if it is there."""
    devices = [matched.devices[n] for n in members]
    if hosts.host_of(devices[0]) == hosts.host_of(hub):
        return hub
    return matched.hubs.next(nbytes, devices)


def said(matched: Matched, name: str) -> str:
    """Returns how an algorithm is called in plans."""
    return f"{name} of hosts" if hosts.in_levels(matched.devices) else name


def spread(
    devices: Sequence[str], leaders: Sequence[int], received: Received
) -> Received:
    """Has all participants read, of their leaders, what these received."""
    result: Received = [[] for _ in devices]
    for leader, members, parts in zip(
        leaders, hosts.by_host(devices), received, strict=True
    ):
        if len(members) > 1:
            with tf.device(devices[leader]):
                parts = [
                    part if part.device == devices[leader] else arithmetic.hop(part)
                    for part in parts
                ]
        for n in members:
            result[n] = parts
    return result


def hand_out(matched: Matched, parts: Sequence[tf.Tensor], at: str) -> Received:
    """Has all participants read the same tensors, which each host receives once.

    Args:
        matched: The communication.
        parts: What they read.
        at: The device that has them.
    """
    parts = list(parts)
    if not hosts.in_levels(matched.devices):
        return [parts for _ in matched.devices]
    chosen = leaders(matched, at, sum(map(cost.tensor_bytes, parts)))
    return spread(matched.devices, chosen, [parts for _ in chosen])


def join(
    matched: Matched, column: Sequence[tf.Tensor], axis: int | None, at: str
) -> tf.Tensor:
    """Concatenates one tensor per participant on a device, in replica order.

    Replicas of a host that follow one another are concatenated there first.

    Args:
        matched: The communication.
        column: `column[n]` is the tensor of the n-th participant.
        axis: Along which axis; None: along a new leading one.
        at: Where; the device of a participant.
    """
    return join_each(matched, column, axis, [at])[at]


def join_for_all(
    matched: Matched, column: Sequence[tf.Tensor], axis: int | None, hub: str
) -> list[tf.Tensor]:
    """Concatenates one tensor per participant, for all; returns one result for each.

    On one host that is done on the hub. Of several, each receives what the others have,
    and concatenates it itself: from a hub, it would receive what it sent there, too.

    Args:
        matched: The communication.
        column: `column[n]` is the tensor of the n-th participant.
        axis: Along which axis; None: along a new leading one.
        hub: A device that does it.
    """
    if not hosts.are_several(matched.devices):
        return [join(matched, column, axis, hub)] * len(matched.devices)
    nbytes = sum(map(cost.tensor_bytes, column))
    places = [
        leader(matched, members, hub, nbytes)
        for members in hosts.by_host(matched.devices)
    ]
    joined = join_each(matched, column, axis, places)
    of_host = {hosts.host_of(place): tensor for place, tensor in joined.items()}
    return [of_host[hosts.host_of(device)] for device in matched.devices]


def join_each(
    matched: Matched,
    column: Sequence[tf.Tensor],
    axis: int | None,
    places: Sequence[str],
) -> dict[str, tf.Tensor]:
    """Concatenates one tensor per participant on each of some devices, as `join`.

    Args:
        matched: The communication.
        column: `column[n]` is the tensor of the n-th participant.
        axis: Along which axis; None: along a new leading one.
        places: Where: devices of participants, at most one of each host.

    Returns:
        The results, by their devices.
    """
    if hosts.in_levels(matched.devices):
        runs = _runs_of(matched, column, axis, places)
        whole = functools.partial(tf.concat, runs, 0 if axis is None else axis)
    else:
        whole = functools.partial(axes.join, column, axis)
    joined = {}
    for place in places:
        with tf.device(place):
            joined[place] = whole()
    return joined


def _runs_of(
    matched: Matched,
    column: Sequence[tf.Tensor],
    axis: int | None,
    places: Sequence[str],
) -> list[tf.Tensor]:
    """Concatenates what consecutive replicas of a host pass, there."""
    of_host = {hosts.host_of(place): place for place in places}
    joined = []
    for run in _runs(matched.devices):
        own = [column[n] for n in run]
        if axis is not None and len(run) == 1:
            joined += own
            continue
        home = hosts.host_of(matched.devices[run[0]])
        nbytes = sum(map(cost.tensor_bytes, own))
        with tf.device(of_host.get(home) or leader(matched, run, places[0], nbytes)):
            joined.append(axes.join(own, axis))
    return joined


def _runs(devices: Sequence[str]) -> list[list[int]]:
    """Returns the places of devices of one host that follow one another."""
    runs: list[list[int]] = []
    for n, device in enumerate(devices):
        if n and hosts.host_of(device) == hosts.host_of(devices[n - 1]):
            runs[-1].append(n)
        else:
            runs.append([n])
    return runs
