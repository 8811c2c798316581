# SPDX-License-Identifier: Apache-2.0
"""Communication in two levels: within each host, and between hosts.

All devices of a host share its link to the other hosts, and TensorFlow sends a tensor
once to each device that reads it. So where hosts have several replicas, their operands
are combined into one tensor on one device of the host (the leader) before it crosses
the link; the leader alone reads what arrives, and the others read it from the leader.
Each tensor, or bucket, crosses from one host to another in one message, or in one per
slice if the algorithm between hosts slices it.

For a communication on one host, or if no host has several of its replicas, there is one
level and this module adds no op.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from replicator.costs import cost, hosts
from replicator.graph.lowering.matched import Matched
from replicator.primitives import arithmetic, axes

# `received[n]` holds the parts of participant n's result, on its device or for it to
# read: the value, and for "argmin" and "argmax" the owner.
Received = list[list[tf.Tensor]]


def leaders(matched: Matched, hub: str, nbytes: int) -> list[int]:
    """Returns the participants that communicate between hosts, one per host.

    Args:
        matched: The communication.
        hub: A device that must be one of them.
        nbytes: The number of bytes that each will process.

    Returns:
        Indices of participants; all of them if there is only one level.
    """
    if not hosts.in_levels(matched.devices):
        return list(range(len(matched.devices)))
    return [
        matched.devices.index(leader(matched, members, hub, nbytes))
        for members in hosts.by_host(matched.devices)
    ]


def leader(matched: Matched, members: Sequence[int], hub: str, nbytes: int) -> str:
    """Returns the device that works for its host: the hub if it is there."""
    devices = [matched.devices[n] for n in members]
    if hosts.host_of(devices[0]) == hosts.host_of(hub):
        return hub
    return matched.hubs.next(nbytes, devices)


def display_name(matched: Matched, name: str) -> str:
    """Returns an algorithm's name as plans show it."""
    return f"{name} of hosts" if hosts.in_levels(matched.devices) else name


def spread(
    devices: Sequence[str], leaders: Sequence[int], received: Received
) -> Received:
    """Has all participants read their leader's parts.

    Args:
        devices: The devices of the participants.
        leaders: One participant per host.
        received: The parts that each leader received.
    """
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


def distribute(matched: Matched, parts: Sequence[tf.Tensor], at: str) -> Received:
    """Has all participants read the same tensors, which each host receives once.

    Args:
        matched: The communication.
        parts: The tensors.
        at: The device that holds them.
    """
    parts = list(parts)
    if not hosts.in_levels(matched.devices):
        return [parts for _ in matched.devices]
    readers = leaders(matched, at, sum(map(cost.tensor_bytes, parts)))
    return spread(matched.devices, readers, [parts for _ in readers])


def join(
    matched: Matched, column: Sequence[tf.Tensor], axis: int | None, at: str
) -> tf.Tensor:
    """Concatenates one tensor per participant on a device, in replica order.

    Consecutive replicas of one host are concatenated on that host first.

    Args:
        matched: The communication.
        column: `column[n]` is the tensor of the n-th participant.
        axis: The axis to concatenate along; None: a new leading axis.
        at: The device of a participant.
    """
    return join_each(matched, column, axis, [at])[at]


def join_for_all(
    matched: Matched, column: Sequence[tf.Tensor], axis: int | None, hub: str
) -> list[tf.Tensor]:
    """Concatenates one tensor per participant; returns a result for each participant.

    On one host, the hub does so for all. Among several, each host receives the others'
    tensors and concatenates itself: from a hub it would receive its own tensors back.

    Args:
        matched: The communication.
        column: `column[n]` is the tensor of the n-th participant.
        axis: The axis to concatenate along; None: a new leading axis.
        hub: The device to use on its host.
    """
    if not hosts.are_several(matched.devices):
        return [join(matched, column, axis, hub)] * len(matched.devices)
    nbytes = sum(map(cost.tensor_bytes, column))
    host_devices = [
        leader(matched, members, hub, nbytes)
        for members in hosts.by_host(matched.devices)
    ]
    joined = join_each(matched, column, axis, host_devices)
    joined_on = {hosts.host_of(place): tensor for place, tensor in joined.items()}
    return [joined_on[hosts.host_of(device)] for device in matched.devices]


def join_each(
    matched: Matched,
    column: Sequence[tf.Tensor],
    axis: int | None,
    places: Sequence[str],
) -> dict[str, tf.Tensor]:
    """Concatenates one tensor per participant on several devices, as `join` does.

    Args:
        matched: The communication.
        column: `column[n]` is the tensor of the n-th participant.
        axis: The axis to concatenate along; None: a new leading axis.
        places: Devices of participants, at most one per host.

    Returns:
        The results, by device.
    """
    if hosts.in_levels(matched.devices):
        runs = _runs_of(matched, column, axis, places)
        concatenate = functools.partial(tf.concat, runs, 0 if axis is None else axis)
    else:
        concatenate = functools.partial(axes.join, column, axis)
    joined = {}
    for place in places:
        with tf.device(place):
            joined[place] = concatenate()
    return joined


def _runs_of(
    matched: Matched,
    column: Sequence[tf.Tensor],
    axis: int | None,
    places: Sequence[str],
) -> list[tf.Tensor]:
    """Concatenates each run of consecutive replicas' tensors on their common host."""
    place_on = {hosts.host_of(place): place for place in places}
    joined = []
    for run in _runs(matched.devices):
        tensors = [column[n] for n in run]
        if axis is not None and len(run) == 1:
            joined += tensors
            continue
        host = hosts.host_of(matched.devices[run[0]])
        nbytes = sum(map(cost.tensor_bytes, tensors))
        with tf.device(place_on.get(host) or leader(matched, run, places[0], nbytes)):
            joined.append(axes.join(tensors, axis))
    return joined


def _runs(devices: Sequence[str]) -> list[list[int]]:
    """Returns the indices of consecutive devices of one host, run by run."""
    runs: list[list[int]] = []
    for n, device in enumerate(devices):
        if n and hosts.host_of(device) == hosts.host_of(devices[n - 1]):
            runs[-1].append(n)
        else:
            runs.append([n])
    return runs
