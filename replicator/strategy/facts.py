# SPDX-License-Identifier: Apache-2.0
"""Facts for builders: about each variable, and about the devices."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence

import tensorflow as tf

from replicator.costs import hosts, rates
from replicator.variables.chooser import VariableFacts
from replicator.world import World

__all__ = ["Resources", "VariableFacts", "resources_of"]


@dataclasses.dataclass(frozen=True)
class Resources:
    """The devices that variables can be placed on, and their connections.

    Example:
        >>> resources = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> resources.num_replicas, resources.cpus
        (2, ('CPU:0', 'CPU:1'))

    Attributes:
        devices: The device of each replica.
        cpus: The CPU devices that can be parameter servers: those of replicas; on hosts
            without any, the first CPU. Derived from `devices` by default.
        memory: The bytes of memory of devices, by name, where known.
        calibration: What work costs on the devices, and between them.
        one_program: Whether one program builds all replicas. In between-graph mode
            several do, and no variable can be on a single device.
    """

    devices: tuple[str, ...]
    cpus: tuple[str, ...] = ()
    memory: tuple[tuple[str, int], ...] = ()
    calibration: rates.Calibration = rates.Calibration()
    one_program: bool = True

    def __post_init__(self) -> None:
        if not self.cpus:
            object.__setattr__(self, "cpus", _cpus(self.devices))

    @property
    def num_replicas(self) -> int:
        """The number of replicas.

        Example:
            >>> replicator.strategy.Resources(("GPU:0", "GPU:1")).num_replicas
            2
        """
        return len(self.devices)

    def bandwidth(self, source: str, destination: str) -> float:
        """Returns the bandwidth between two devices, in bytes per second.

        Example:
            >>> resources = replicator.strategy.Resources(("CPU:0", "CPU:1"))
            >>> resources.bandwidth("CPU:0", "CPU:1") > 0
            True

        Args:
            source: A device.
            destination: Another one.
        """
        ends = hosts.host_of(source), hosts.host_of(destination)
        if ends[0] != ends[1]:
            seconds = self.calibration.between(*ends).link
        else:
            kinds = {_kind(source), _kind(destination)}
            kind = "cpu" if kinds == {"CPU"} else "gpu"
            seconds = self.calibration.of(kind).link
        return 1 / seconds if seconds else math.inf  # nothing is copied between them


def resources_of(world: World, calibration: rates.Calibration) -> Resources:
    """Returns the resources of a world.

    Args:
        world: The replicas.
        calibration: What work costs.
    """
    devices = tuple(world.all_devices)
    return Resources(
        devices,
        _cpus(devices),
        _memory(devices),
        calibration,
        one_program=not world.processes,
    )


def sparse_if_known(variable: VariableFacts) -> bool | None:
    """Returns whether a gradient is sparse; None before a step has been built.

    A builder that reads `variable.sparse` waits for that step; see live.py.
    """
    sparse: bool | None = vars(variable)["sparse"]
    return sparse


def _cpus(devices: Sequence[str]) -> tuple[str, ...]:
    """Returns the CPUs among some devices, and the first CPU of hosts without any."""
    servers: list[str] = []
    for members in hosts.by_host(devices):
        host_devices = [devices[r] for r in members]
        cpus = [name for name in host_devices if _kind(name) == "CPU"]
        servers += cpus or [hosts.cpu_of(host_devices[0])]
    return tuple(servers)


def _kind(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device if device[:1] == "/" else f"/{device}")
    return str(spec.device_type).upper()


def _memory(devices: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Returns the memory of this host's CPU devices; each has all of it."""
    try:
        nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return ()
    return tuple((name, nbytes) for name in devices if _kind(name) == "CPU")
