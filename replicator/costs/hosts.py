# SPDX-License-Identifier: Apache-2.0
"""Which devices are on which host: what the two levels of communication are made of.

A host is a process that runs devices: a job, a replica and a task of TensorFlow.
Devices of one host hand tensors to one another at once, or over its own bus; what
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
    """Returns a CPU of a device's host: itself if it is one, else the first.

    Args:
        device: A full name.
    """
    host, _, own = device.rpartition("/device:")
    return device if own.startswith("CPU:") else f"{host}/device:CPU:0"


def by_host(devices: Sequence[str]) -> list[list[int]]:
    """Returns the places of the devices of each host.

    Args:
        devices: `devices[n]` is where participant n runs.

    Returns:
        A list per host, in the order in which they come first; each place once.
    """
    places: dict[str, list[int]] = {}
    for n, device in enumerate(devices):
        places.setdefault(host_of(device), []).append(n)
    return list(places.values())


def are_several(devices: Sequence[str]) -> bool:
    """Whether devices are on more than one host."""
    return len({host_of(device) for device in devices}) > 1


def in_levels(devices: Sequence[str]) -> bool:
    """Whether there is a level within hosts, and one between them.

    So it is on several hosts if any of them has more than one of the devices.
    """
    return 1 < len({host_of(device) for device in devices}) < len(devices)
