# SPDX-License-Identifier: Apache-2.0
"""A variable's placement: where its components are and what they hold.

Every difference between variables follows from it: how the components are created,
which handle a replica uses in a step, how the variable is read and written outside a
step, what a checkpoint holds, and which replicas its gradients are reduced to.

| placement | components | handle in a step | read outside | written outside |
|---|---|---|---|---|
| Mirrored | equal, one per replica | its own | the first | all |
| Owned | one for all replicas | an alias of it | it | it |
| Aggregated | one per replica | its own | aggregated | to match the read |
| Seeded | a seed for each replica | its own | the first | all, offset |
| Rows | rows for each replica | its own | concatenated | all rows to the first |
| Owed | a row for each replica | its own | concatenated | a row each, or the sum |

Rows and Owed, which optimizers and compressors collect, are in collected.py.

AutoDist calls this the configuration of a node, TorchRec an entry of a sharding plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from replicator._tf import graphs
from replicator.graph.passes.owners import Aliases
from replicator.primitives import arithmetic, base
from replicator.variables.seeds import Seed
from replicator.world import World

if TYPE_CHECKING:
    from replicator import context

_SUM = tf.VariableAggregation.SUM
_MEAN = tf.VariableAggregation.MEAN
# In which dtype components are added up, where it is not their own: as in all_reduce,
# 16-bit floats lose nothing before the result is rounded; means of integers fit.
_WIDE = {
    **dict.fromkeys((tf.float16, tf.bfloat16), tf.float32),
    **dict.fromkeys((tf.int8, tf.int16, tf.int32), tf.int64),
    **dict.fromkeys((tf.uint8, tf.uint16, tf.uint32), tf.int64),
}


@dataclasses.dataclass(frozen=True)
class Write:
    """One write to one component.

    Attributes:
        variable: The variable, or its first component.
        replica_id: The replica whose component is written.
        method: The method that writes it.
        is_copied: Whether other replicas' writes will be copies of this one.
    """

    variable: Any
    replica_id: int
    method: str = "assign"
    is_copied: bool = False

    @classmethod
    def by(cls, replica: context.ReplicaContext, variable: Any, method: str) -> Write:
        """Returns a write by the replica that is being built."""
        copied = not replica.build.all_traced
        return cls(variable, replica.replica_id, method, copied)

    def own(self, value_of: Callable[[int], bool | int]) -> Any:
        """Returns what is made of the replica's id; a tensor if the write is copied."""
        return base.differing(value_of) if self.is_copied else value_of(self.replica_id)

    def as_tensor(self, value: Any) -> tf.Tensor:
        """Converts a value to a tensor of the variable's dtype."""
        return tf.convert_to_tensor(value, self.variable.dtype)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Base class of placements: the defaults that subclasses override."""

    @property
    def owner(self) -> int | None:
        """The replica that gradients and the like are reduced to; None: to all."""
        return None

    @property
    def differs(self) -> bool:
        """Whether the components are meant to hold different values."""
        return False

    @property
    def slot(self) -> Placement:
        """The placement of the slots that optimizers create for the variable."""
        return Mirrored()

    @property
    def has_copies(self) -> bool:
        """Whether replicas have copies of a variable that one of them owns."""
        return False

    @property
    def is_copied(self) -> bool:
        """Whether there are several components with one value."""
        return self.owner is None and not self.differs

    @property
    def is_aggregated(self) -> bool:
        """Whether reads outside a step return something other than a component."""
        return False

    @property
    def adds_up(self) -> bool:
        """Whether reads outside a step return the sum of the components."""
        return False

    @property
    def shared(self) -> bool:
        """Whether other programs write the variable too."""
        return False

    @property
    def grows(self) -> bool:
        """Whether reads outside a step may return any number of rows."""
        return False

    def device(self, world: World) -> str:
        """Returns the device on which the first component is created."""
        return world.devices[0]

    def components(
        self, first: tf.Variable, on: Callable[[int], tf.Variable], world: World
    ) -> list[tf.Variable]:
        """Returns the component of each local replica.

        Args:
            first: The component that was created first, on `device(world)`.
            on: Returns a component on a replica's device.
            world: The replicas.
        """
        return [on(r) for r in world.local]

    def first(self, components: Sequence[tf.Variable], world: World) -> tf.Variable:
        """Returns the component whose handle the variable has outside steps."""
        return components[0]

    def outside(self, components: Sequence[tf.Variable]) -> tuple[tf.Variable, ...]:
        """Returns the components that code outside a step reads and writes."""
        return tuple(components)

    def handle(self, variable: Any, replica: context.ReplicaContext) -> tf.Tensor:
        """Returns the handle by which the replica being built uses a variable."""
        return self.handle_on(variable, replica.replica_id, replica.build.aliases)

    def handle_on(self, variable: Any, replica_id: int, aliases: Aliases) -> tf.Tensor:
        """Returns the handle by which a replica uses a variable in a build.

        Args:
            variable: The ReplicatedVariable.
            replica_id: The replica.
            aliases: The build's aliases.
        """
        handle = variable.components[variable.world.place(replica_id)].handle
        aliases.note(handle, variable)
        return handle

    def handles_on(
        self, variable: Any, replica_id: int, aliases: Aliases
    ) -> list[tf.Tensor]:
        """Returns all handles by which a replica may use a variable in a build."""
        return [self.handle_on(variable, replica_id, aliases)]

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Combines the components' values into the one that is read outside a step."""
        return values[0]

    def written(self, value: Any, write: Write) -> Any:
        """Returns a component's share of a value that is written outside a step.

        Args:
            value: The value to assign, add or subtract.
            write: Which component is written, and how.
        """
        return value

    def assigned(self, value: Any, write: Write) -> Any:
        """Returns what a replica writes in a step if the components may differ."""
        return value


@dataclasses.dataclass(frozen=True)
class Mirrored(Placement):
    """One component per replica, all of them equal."""


@dataclasses.dataclass(frozen=True)
class Owned(Placement):
    """One component in place of all, on one replica's device or on another.

    The other replicas reach it through aliases of its handle; of all replicas' writes,
    only the owner's is kept. ZeRO (Rajbhandari et al., 2020) divides the optimizer's
    state and the gradients like this in its first two stages.

    Attributes:
        replica: The owner. Gradients are reduced to its device, and its writes update
            the variable, wherever that is.
        on: The device that holds the variable, if it is no replica's device.
        proxies: Whether each replica has a copy, which steps read; see copies.py.
        shared: Whether other programs also read and write it, at any time.
    """

    replica: int
    on: str = ""
    proxies: bool = False
    shared: bool = False

    @property
    def owner(self) -> int | None:
        """The replica that holds the variable, or acts for the device that does."""
        return self.replica

    @property
    def slot(self) -> Placement:
        """Slots are placed with the variable, without copies."""
        return Owned(self.replica, self.on)

    @property
    def has_copies(self) -> bool:
        """Whether each replica has a proxy."""
        return self.proxies

    def device(self, world: World) -> str:
        """Returns the device of the one component."""
        return self.on or world.device(self.replica)

    def components(
        self, first: tf.Variable, on: Callable[[int], tf.Variable], world: World
    ) -> list[tf.Variable]:
        """Returns the one component for all replicas, or the replicas' copies of it.

        The source of the copies is one of them, or comes last if it is on `on`.
        """
        if not self.proxies:
            return [first] * world.num_local
        copies = [on(r) for r in world.local]
        return [*copies, first] if self.on else copies

    def first(self, components: Sequence[tf.Variable], world: World) -> tf.Variable:
        """Returns the component that others are copies of."""
        if not self.proxies:
            return components[0]
        return components[-1 if self.on else world.place(self.replica)]

    def outside(self, components: Sequence[tf.Variable]) -> tuple[tf.Variable, ...]:
        """Returns the one component, or all of them if it has copies."""
        return tuple(components) if self.proxies else tuple(components[:1])

    def handle(self, variable: Any, replica: context.ReplicaContext) -> tf.Tensor:
        """Returns an alias, or in a graph that stands in for the step's, the handle.

        With copies, only updates use these; other ops use the replica's own copy.
        """
        if self.proxies and not replica.mode.updating:
            aliases = replica.build.aliases
            return super().handle_on(variable, replica.replica_id, aliases)
        if not graphs.stands_in(replica.build.graph):
            handle = variable.storage.first.handle
            replica.build.aliases.note(handle, variable)
            return handle
        return super().handle(variable, replica)

    def handle_on(self, variable: Any, replica_id: int, aliases: Aliases) -> tf.Tensor:
        """Returns the replica's alias of the handle."""
        return aliases.of(variable, replica_id)

    def handles_on(
        self, variable: Any, replica_id: int, aliases: Aliases
    ) -> list[tf.Tensor]:
        """Returns the alias, and the handle of the replica's copy if it has one."""
        handles = super().handles_on(variable, replica_id, aliases)
        if self.proxies:
            handles.append(super().handle_on(variable, replica_id, aliases))
        return handles


@dataclasses.dataclass(frozen=True)
class Aggregated(Placement):
    """Each replica keeps its own value, e.g. metrics: VariableSynchronization.ON_READ.

    Attributes:
        aggregation: What reads outside return: the sum, the mean or the first value.
    """

    aggregation: tf.VariableAggregation

    differs = True

    @property
    def is_aggregated(self) -> bool:
        """Whether the aggregation is the sum or the mean."""
        return self.aggregation in (_SUM, _MEAN)

    @property
    def adds_up(self) -> bool:
        """Whether the aggregation is the sum."""
        return self.aggregation == _SUM

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the sum, the mean or the first of the components' values."""
        if not self.is_aggregated or len(values) == 1:
            return values[0]
        dtype = values[0].dtype
        wide = [tf.cast(value, _WIDE.get(dtype, dtype)) for value in values]
        # Unlike tf.add, an AddN refuses shapes that differ at run time.
        total = arithmetic.fold(lambda one, two: tf.add_n([one, two]), wide)
        return tf.cast(total if self.adds_up else total / len(values), dtype)

    def written(self, value: Any, write: Write) -> Any:
        """Gives the whole value to the first component where values add up."""
        is_first = not self.adds_up or write.own(lambda r: r == 0)
        if is_first is True:
            return value
        value = write.as_tensor(value)
        return tf.where(is_first, value, tf.zeros_like(value))


@dataclasses.dataclass(frozen=True)
class Seeded(Placement):
    """The state of a random generator: every replica draws other numbers.

    Attributes:
        seed: Where the state holds its seed, which is offset by the replica id.
    """

    seed: Seed

    differs = True

    def written(self, value: Any, write: Write) -> Any:
        """Offsets the seed of a newly assigned state for the replica."""
        if write.method != "assign":
            return value
        offset = self.seed.offset(write.variable, write.own(int))
        return write.as_tensor(value) + offset

    def assigned(self, value: Any, write: Write) -> Any:
        """Offsets the seed of a new state; an advanced one has its offset already."""
        return self.written(value, write) if self.seed.resets else value
