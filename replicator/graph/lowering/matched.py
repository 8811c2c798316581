# SPDX-License-Identifier: Apache-2.0
"""Matched: one communication with all its participants, the input of a lowering."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator.costs import cost
from replicator.graph.ir.placeholder import Call
from replicator.graph.lowering.crossing import Crossing


@dataclasses.dataclass
class Notes:
    """What a lowering reports of its work, for plans.

    Attributes:
        algorithms: The algorithms used, where the primitive has several.
        moved: (participant, tensor) for each tensor that is sent in place of operands.
    """

    algorithms: list[str] = dataclasses.field(default_factory=list)
    moved: list[tuple[int, tf.Tensor]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Matched:
    """One communication with all its participants, ready to be lowered.

    Attributes:
        calls: `calls[n]` is the call of replica `group[n]`.
        operands: `operands[n][k]` is the k-th tensor that this replica passes.
        devices: `devices[n]` is where it runs.
        hubs: Assigns devices to shared work.
        policy: Everything else that decides how it is lowered.
        notes: What the lowering reports of its work.
        crossing: The channel to the processes that build the other participants; the
            calls here are then the local ones only. None if all participants are here.
    """

    calls: tuple[Call, ...]
    operands: tuple[tuple[tf.Tensor, ...], ...]
    devices: tuple[str, ...]
    hubs: cost.Hubs
    policy: cost.Policy
    notes: Notes = dataclasses.field(default_factory=Notes)
    crossing: Crossing | None = None

    @property
    def options(self) -> dict:
        """The options on which the replicas agreed."""
        return self.calls[0].options

    @property
    def group(self) -> tuple[int, ...]:
        """The replicas that take part, in order."""
        return tuple(call.replica_id for call in self.calls)

    def column(self, k: int) -> list[tf.Tensor]:
        """Returns the k-th operand of every participant, in replica order."""
        return [tensors[k] for tensors in self.operands]

    def passing(self, operands: Sequence[Sequence[tf.Tensor]]) -> Matched:
        """Returns the same communication with other operands."""
        return dataclasses.replace(self, operands=tuple(map(tuple, operands)))

    def hub(self, nbytes: int, owner: int | None = None) -> str:
        """Returns the device that does work for all participants.

        Args:
            nbytes: The amount of work.
            owner: The id of the only replica that needs the result, whose device is
                then used; by default, the device with the least shared work so far.
        """
        if owner is None:
            return self.hubs.next(nbytes, self.devices)
        return self.hubs.next(nbytes, [self.devices[self.group.index(owner)]])

    def owner(self, k: int) -> int | None:
        """Returns the only replica that needs the k-th result, if there is one."""
        return self.calls[0].policy(k).owner

    def algorithm(self, k: int) -> str | None:
        """Returns the user's choice of how to reduce the k-th operands, if any."""
        algorithm: str | None = self.options.get("algorithm")
        return algorithm or self.calls[0].policy(k).algorithm


# A lowering returns `results[n][k]`, what participant n receives as its k-th result.
Lowering = Callable[[Matched], Sequence[Sequence[tf.Tensor]]]
