# SPDX-License-Identifier: Apache-2.0
"""World: all replicas there are, and those of them that this process builds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class World:
    """All replicas there are, and those of them that this process builds.

    What replicas agree on is a matter of the world: groups, means, who owns a variable.
    What is there once per replica is there for the local ones only: devices, components
    of variables, calls of step_fn, values of a PerReplica. An id is always one of the
    world's; a list of what local replicas have is in the order of `local`.

    Attributes:
        num_replicas: How many replicas there are in all, whoever builds them.
        local: The ids of those that are built here, ascending.
        devices: `devices[n]` is where replica `local[n]` runs.
        processes: `processes[r]` is the process that builds replica r; empty if this
            one builds all.
        names: `names[r]` is where replica r runs, if other processes build some.
    """

    num_replicas: int
    local: tuple[int, ...]
    devices: tuple[str, ...]
    processes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ids = (-1, *self.local, self.num_replicas)
        rising = all(a < b for a, b in zip(ids, ids[1:], strict=False))
        assert rising, f"no ids of {self.num_replicas} replicas: {ids}"
        assert len(self.devices) == len(self.local), "each local replica has a device"
        assert len(self.processes) in (0, self.num_replicas), "each has a process"

    @classmethod
    def all_here(cls, devices: Sequence[str]) -> World:
        """Returns the world of which one process builds all.

        Args:
            devices: `devices[r]` is where replica r runs.
        """
        return cls(len(devices), tuple(range(len(devices))), tuple(devices))

    @classmethod
    def divided(
        cls, processes: Sequence[int], own: int, devices: Sequence[str]
    ) -> World:
        """Returns the world of which several processes build parts.

        Args:
            processes: `processes[r]` is the process that builds replica r.
            own: Which process this is.
            devices: `devices[r]` is where replica r runs.
        """
        local = tuple(r for r, process in enumerate(processes) if process == own)
        here = tuple(devices[r] for r in local)
        return cls(len(devices), local, here, tuple(processes), tuple(devices))

    @property
    def num_local(self) -> int:
        """How many replicas are built here."""
        return len(self.local)

    @property
    def everyone(self) -> tuple[int, ...]:
        """The ids of all replicas."""
        return tuple(range(self.num_replicas))

    @property
    def everywhere(self) -> tuple[str, ...]:
        """Where each replica runs, whoever builds it."""
        return self.names or self.devices

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """The ids of those that other processes build."""
        return tuple(sorted(set(self.everyone).difference(self.local)))

    def place(self, replica_id: int) -> int:
        """Returns where a local replica is in lists of what local replicas have."""
        return self.local.index(replica_id)

    def device(self, replica_id: int) -> str:
        """Returns where a local replica runs."""
        return self.devices[self.place(replica_id)]
