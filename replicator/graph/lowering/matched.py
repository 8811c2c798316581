# SPDX-License-Identifier: Apache-2.0
"""Matched: one communication with all who take part, as lowerings are given it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator.costs import cost
from replicator.graph.ir.placeholder import Call
from replicator.graph.lowering.crossing import Crossing


@dataclasses.dataclass
class Notes:
    """What a lowering has to say of its work, for plans.

    Attributes:
        algorithms: How it is done, if not as the primitive always is.
        moved: (participant, tensor) for what is sent in place of operands.
    """

    algorithms: list[str] = dataclasses.field(default_factory=list)
    moved: list[tuple[int, tf.Tensor]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Matched:
    """One communication, with all of its participants, ready to be lowered.

    Attributes:
        calls: `calls[n]` is the call of replica `group[n]`.
        operands: `operands[n][k]` is the k-th tensor that this replica passes.
        devices: `devices[n]` is where it runs.
        hubs: Deals out the devices on which shared work is done.
        policy: What else decides how it is lowered.
        notes: What the lowering says of its work.
        crossing: The way to the processes that build the other participants; these
            then are local ones. None: all are here.
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
        """What the replicas agreed on."""
        return self.calls[0].options

    @property
    def group(self) -> tuple[int, ...]:
        """The replicas that take part, in order."""
        return tuple(call.replica_id for call in self.calls)

    def column(self, k: int) -> list[tf.Tensor]:
        """Returns the k-th operand of every participant, in replica order."""
        return [own[k] for own in self.operands]

    def passing(self, operands: Sequence[Sequence[tf.Tensor]]) -> Matched:
        """Returns the same communication of other tensors."""
        return dataclasses.replace(self, operands=tuple(map(tuple, operands)))

    def hub(self, nbytes: int, owner: int | None = None) -> str:
        """Returns the device on which to work for all participants.

        Args:
            nbytes: How much it will have to do.
            owner: The participant that needs the result, by its replica's id. Its
                device; unless given, that with the least shared work so far.
        """
        if owner is None:
            return self.hubs.next(nbytes, self.devices)
        return self.hubs.next(nbytes, [self.devices[self.group.index(owner)]])

    def owner(self, k: int) -> int | None:
        """Returns the replica that needs what becomes of the k-th operands, if one."""
        return self.calls[0].policy(k).owner

    def algorithm(self, k: int) -> str | None:
        """Returns how the k-th operands are to be reduced, if the call says so."""
        named: str | None = self.options.get("algorithm")
        return named or self.calls[0].policy(k).algorithm


# A lowering returns `results[n][k]`, what participant n receives as its k-th result.
Lowering = Callable[[Matched], Sequence[Sequence[tf.Tensor]]]
