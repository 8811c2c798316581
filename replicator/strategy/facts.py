# SPDX-License-Identifier: Apache-2.0
"""What a builder is told: of each variable, and of the devices there are."""

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
    """The devices on which variables can be, and what joins them.

    Example:
        >>> resources = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> resources.num_replicas, resources.cpus
        (2, ('CPU:0', 'CPU:1'))

    Attributes:
        devices: The device of each replica.
        cpus: The CPU devices that can be parameter servers: those of replicas; on hosts
            where these have none, the first. None: as many as there are in `devices`.
        memory: How many bytes each of these devices has, by its name; left out where
            that is not known.
        calibration: What work costs on them, and between them.
        one_program: Whether one program builds all replicas. In between-graph mode,
            where several do, no variable can be on one device.
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
        """How many replicas there are.

        Example:
            >>> replicator.strategy.Resources(("GPU:0", "GPU:1")).num_replicas
            2
        """
        return len(self.devices)

    def bandwidth(self, source: str, destination: str) -> float:
        """Returns how many bytes a second travel from one device to another.

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
            both = {_kind(source), _kind(destination)}
            kind = "cpu" if both == {"CPU"} else "gpu"
            seconds = self.calibration.of(kind).link
        return 1 / seconds if seconds else math.inf  # nothing is copied


def resources_of(world: World, calibration: rates.Calibration) -> Resources:
    """Returns the resources of some replicas.

    Args:
        world: The replicas.
        calibration: What work costs.
    """
    devices = tuple(world.everywhere)
    return Resources(
        *(devices, _cpus(devices), _memory(devices), calibration),
        one_program=not world.processes,
    )


def sparse_if_known(variable: VariableFacts) -> bool | None:
    """Returns whether a gradient is sparse, None if no step was built that says so.

    A builder that asks `variable.sparse` waits for that step; see live.py.
    """
    known: bool | None = vars(variable)["sparse"]
    return known


def _cpus(devices: Sequence[str]) -> tuple[str, ...]:
    """Returns the CPU devices among some, and the first of hosts that have none."""
    found: list[str] = []
    for members in hosts.by_host(devices):
        own = [devices[r] for r in members]
        cpus = [name for name in own if _kind(name) == "CPU"]
        found += cpus or [_first_cpu(own[0])]
    return tuple(found)


def _first_cpu(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device if device[:1] == "/" else f"/{device}")
    return spec.replace(device_type="CPU", device_index=0).to_string()


def _kind(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device if device[:1] == "/" else f"/{device}")
    return str(spec.device_type).upper()


def _memory(devices: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Returns the memory of this host's CPU devices, of which each has all there is."""
    try:
        nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return ()
    return tuple((name, nbytes) for name in devices if _kind(name) == "CPU")
