# SPDX-License-Identifier: Apache-2.0
"""Groups devices by host, for the two levels of communication.

A host is a process that runs devices: a job, a replica and a task of TensorFlow.
Devices of one host pass tensors to one another directly or over its own bus; what
leaves a host crosses the link that all of its devices share.
"""

from __future__ import annotations

from collections.abc import Sequence


def host_of(device: str) -> str:
    """Returns the host of a device, e.g. "/job:worker/replica:0/task:1".

    Args:
        device: A full name, as of `devices.resolve` or an op.
    """
    return device.rpartition("/device:")[0]


def cpu_of(device: str) -> str:
    """Returns a CPU on a device's host: the device itself if it is one, else the first.

    Args:
        device: A full name.
    """
    host, _, device_on_host = device.rpartition("/device:")
    return device if device_on_host.startswith("CPU:") else f"{host}/device:CPU:0"


def by_host(devices: Sequence[str]) -> list[list[int]]:
    """Returns the indices of the devices of each host.

    Args:
        devices: `devices[n]` is the device of participant n.

    Returns:
        A list per host, in order of first occurrence; each index once.
    """
    indices: dict[str, list[int]] = {}
    for n, device in enumerate(devices):
        indices.setdefault(host_of(device), []).append(n)
    return list(indices.values())


def are_several(devices: Sequence[str]) -> bool:
    """Whether devices are on more than one host."""
    return len({host_of(device) for device in devices}) > 1


def in_levels(devices: Sequence[str]) -> bool:
    """Whether communication has two levels: within hosts, and between them.

    It does on several hosts if any of them has more than one of the devices.
    """
    return 1 < len({host_of(device) for device in devices}) < len(devices)
