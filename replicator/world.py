# SPDX-License-Identifier: Apache-2.0
"""World: all replicas, and which of them this process builds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class World:
    """All replicas, and those of them that this process builds.

    What replicas agree on concerns all of them: groups, means, owners of variables.
    What exists once per replica exists for the local ones only: devices, components of
    variables, calls of step_fn, values of a PerReplica. A replica id always counts all
    replicas; a list with one entry per local replica is in the order of `local`.

    Attributes:
        num_replicas: The number of replicas in all, whichever process builds them.
        local: The ids of the replicas built here, ascending.
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
    def single_process(cls, devices: Sequence[str]) -> World:
        """Returns a world whose replicas are all built by one process.

        Args:
            devices: `devices[r]` is where replica r runs.
        """
        return cls(len(devices), tuple(range(len(devices))), tuple(devices))

    @classmethod
    def divided(
        cls, processes: Sequence[int], process: int, devices: Sequence[str]
    ) -> World:
        """Returns a world whose replicas are built by several processes.

        Args:
            processes: `processes[r]` is the process that builds replica r.
            process: The number of this process.
            devices: `devices[r]` is where replica r runs.
        """
        local = tuple(r for r, owner in enumerate(processes) if owner == process)
        local_devices = tuple(devices[r] for r in local)
        return cls(len(devices), local, local_devices, tuple(processes), tuple(devices))

    @property
    def num_local(self) -> int:
        """The number of replicas built here."""
        return len(self.local)

    @property
    def replica_ids(self) -> tuple[int, ...]:
        """The ids of all replicas."""
        return tuple(range(self.num_replicas))

    @property
    def all_devices(self) -> tuple[str, ...]:
        """Where each replica runs, whichever process builds it."""
        return self.names or self.devices

    def place(self, replica_id: int) -> int:
        """Returns a local replica's index in lists with one entry per local one."""
        return self.local.index(replica_id)

    def device(self, replica_id: int) -> str:
        """Returns where a local replica runs."""
        return self.devices[self.place(replica_id)]
