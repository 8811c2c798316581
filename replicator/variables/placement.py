# SPDX-License-Identifier: Apache-2.0
"""Where the components of a variable are and what they hold: its placement.

Everything in which variables differ from one another is a consequence of it: how the
components are created, which handle a replica uses in a step, how a variable is read
and written outside of one, what a checkpoint holds, and whom gradients are reduced for.

| placement | components | handle in a step | read outside | written outside |
|---|---|---|---|---|
| Mirrored | equal, one per replica | its own | the first | all |
| Owned | one for all replicas | an alias of it | it | it |
| Aggregated | one per replica | its own | aggregated | as it is read |
| Seeded | a seed for each replica | its own | the first | all, offset |
| Rows | rows for each replica | its own | concatenated | all to the first |
| Owed | a row for each replica | its own | concatenated | one to each, or the sum |

Rows and Owed, which optimizers and compressors collect, are in collected.py.

AutoDist calls this the configuration of a node, TorchRec an entry of a sharding plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.passes.owners import Aliases
from replicator.primitives import arithmetic
from replicator.variables.seeds import Seed
from replicator.world import World

if TYPE_CHECKING:
    from replicator import context

_SUM = tf.VariableAggregation.SUM
_MEAN = tf.VariableAggregation.MEAN


@dataclasses.dataclass(frozen=True)
class Write:
    """A component that is about to be written.

    Attributes:
        variable: The variable, or its first component.
        replica_id: Whose component.
        method: By which it is written.
    """

    variable: Any
    replica_id: int
    method: str = "assign"

    def as_tensor(self, value: Any) -> tf.Tensor:
        """Returns a value as a tensor of the variable's type."""
        return tf.convert_to_tensor(value, self.variable.dtype)


@dataclasses.dataclass(frozen=True)
class Placement:
    """What a variable is like, as long as a subclass does not say otherwise."""

    @property
    def owner(self) -> int | None:
        """The replica that what is reduced for the variable goes to; None: to all."""
        return None

    @property
    def differs(self) -> bool:
        """Whether the components are meant to hold different values."""
        return False

    @property
    def slot(self) -> Placement:
        """The placement of what optimizers create to go with the variable."""
        return Mirrored()

    @property
    def has_copies(self) -> bool:
        """Whether replicas have copies of what one of them owns."""
        return False

    @property
    def is_copied(self) -> bool:
        """Whether there are several components, and any is as good as another."""
        return self.owner is None and not self.differs

    @property
    def is_aggregated(self) -> bool:
        """Whether what is read outside is no component's value."""
        return False

    @property
    def adds_up(self) -> bool:
        """Whether what is read outside is the sum of the components."""
        return False

    @property
    def shared(self) -> bool:
        """Whether other programs write the variable, too."""
        return False

    @property
    def grows(self) -> bool:
        """Whether what is read outside may have any number of rows."""
        return False

    def device(self, world: World) -> str:
        """Returns where the first component is created."""
        return world.devices[0]

    def components(
        self, first: tf.Variable, on: Callable[[int], tf.Variable], world: World
    ) -> list[tf.Variable]:
        """Returns the component of each local replica.

        Args:
            first: The one that was made first, where `device` says.
            on: Returns the one on a replica's device.
            world: The replicas.
        """
        return [on(r) for r in world.local]

    def first(self, components: Sequence[tf.Variable], world: World) -> tf.Variable:
        """Returns the component whose handle a variable has outside of steps."""
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
            aliases: Those of the build.
        """
        handle = variable.components[variable.world.place(replica_id)].handle
        aliases.note(handle, variable)
        return handle

    def handles_on(
        self, variable: Any, replica_id: int, aliases: Aliases
    ) -> list[tf.Tensor]:
        """Returns all handles by which a replica may use a variable in a build."""
        return [self.handle_on(variable, replica_id, aliases)]

    def brought(self, value: tf.Tensor, replica: context.ReplicaContext) -> tf.Tensor:
        """Returns what a replica has read, where its ops expect it."""
        return value

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns what the components' values are together, outside a step."""
        return values[0]

    def written(self, value: Any, write: Write) -> Any:
        """Returns what a component gets of a value that is written outside a step.

        Args:
            value: Is assigned, added or subtracted.
            write: What is written of it, and how.
        """
        return value

    def assigned(self, value: Any, write: Write) -> Any:
        """Returns what a replica writes inside a step, where components may differ."""
        return value


@dataclasses.dataclass(frozen=True)
class Mirrored(Placement):
    """One component per replica; all of them are equal."""


@dataclasses.dataclass(frozen=True)
class Owned(Placement):
    """One component in place of all, on the device of one replica, or on another.

    The others reach it by aliases of its handle; of the writes of all replicas the
    owner's is kept. See ZeRO (Rajbhandari et al., 2020), whose first two stages divide
    the state of the optimizer and the gradients like this.

    Attributes:
        replica: The owner. On its device gradients are reduced, by its writes the
            variable is updated, where that is.
        on: Where the variable is, if that is no replica's device.
        proxies: Whether each replica has a copy, which steps read; see copies.py.
        shared: Whether other programs read and write it, too, at any time.
    """

    replica: int
    on: str = ""
    proxies: bool = False
    shared: bool = False

    @property
    def owner(self) -> int | None:
        """The replica that has it, or stands for the device that has."""
        return self.replica

    @property
    def slot(self) -> Placement:
        """They are where it is."""
        return Owned(self.replica, self.on)

    @property
    def has_copies(self) -> bool:
        """They may."""
        return self.proxies

    def device(self, world: World) -> str:
        """Returns where the one component is."""
        return self.on or world.device(self.replica)

    def components(
        self, first: tf.Variable, on: Callable[[int], tf.Variable], world: World
    ) -> list[tf.Variable]:
        """Returns the one for all replicas; or the copies of it.

        What they are copies of is one of them, or if it is apart, comes last.
        """
        if not self.proxies:
            return [first] * world.num_local
        own = [on(r) for r in world.local]
        return [*own, first] if self.on else own

    def first(self, components: Sequence[tf.Variable], world: World) -> tf.Variable:
        """Returns the one that others are copies of."""
        if not self.proxies:
            return components[0]
        return components[-1 if self.on else world.place(self.replica)]

    def outside(self, components: Sequence[tf.Variable]) -> tuple[tf.Variable, ...]:
        """Returns the one component; all, if there are copies of it."""
        return tuple(components) if self.proxies else tuple(components[:1])

    def handle(self, variable: Any, replica: context.ReplicaContext) -> tf.Tensor:
        """Returns an alias; in a graph that stands in for the step's, the handle.

        Of a variable with copies, that is for updates; else the replica's own copy's.
        """
        if self.proxies and not replica.updating:
            aliases = replica.build.aliases
            return super().handle_on(variable, replica.replica_id, aliases)
        if not _tf.stands_in(replica.build.graph):
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

    def brought(self, value: tf.Tensor, replica: context.ReplicaContext) -> tf.Tensor:
        """Brings what was read to the replica, if it has to be.

        In the loops of TensorFlow 1 gradients keep values where they are read, and take
        them from there on the replica's device.
        """
        if _tf.control_flow_context(tf.compat.v1.get_default_graph()) != "v1":
            return value
        with tf.device(replica.device):
            return tf.identity(value)


@dataclasses.dataclass(frozen=True)
class Aggregated(Placement):
    """Each replica's own, as of metrics: tf.VariableSynchronization.ON_READ.

    Attributes:
        aggregation: What is read outside: the sum, the mean, or the first component.
    """

    aggregation: tf.VariableAggregation

    differs = True

    @property
    def is_aggregated(self) -> bool:
        """The sum and the mean are."""
        return self.aggregation in (_SUM, _MEAN)

    @property
    def adds_up(self) -> bool:
        """The sum is."""
        return self.aggregation == _SUM

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the sum, the mean or the first of the components' values."""
        if not self.is_aggregated or len(values) == 1:
            return values[0]
        total = arithmetic.fold(tf.add, values)
        return total if self.adds_up else tf.cast(total / len(values), total.dtype)

    def written(self, value: Any, write: Write) -> Any:
        """Returns zeros for all but the first where the sum shall be the value."""
        if write.replica_id and self.adds_up:
            return tf.zeros_like(write.as_tensor(value))
        return value


@dataclasses.dataclass(frozen=True)
class Seeded(Placement):
    """The state of a random generator: every replica draws other numbers.

    Attributes:
        seed: Where the state holds its seed, which is offset by the replica.
    """

    seed: Seed

    differs = True

    def written(self, value: Any, write: Write) -> Any:
        """Returns a state with the replica's seed."""
        if not write.replica_id or write.method != "assign":
            return value
        offset = self.seed.offset(write.variable, write.replica_id)
        return write.as_tensor(value) + offset

    def assigned(self, value: Any, write: Write) -> Any:
        """Returns a new state with the replica's seed; what goes on has it already."""
        return self.written(value, write) if self.seed.resets else value
