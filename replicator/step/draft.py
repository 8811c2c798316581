# SPDX-License-Identifier: Apache-2.0
"""A step while it is built (Draft) and once it is (Built), as the passes see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

import tensorflow as tf

from replicator import context
from replicator.cluster.peers import Peers
from replicator.graph.lowering import record
from replicator.graph.matching.elsewhere import Elsewhere
from replicator.graph.order import effects
from replicator.graph.passes import owners
from replicator.inputs import feeds
from replicator.options import Options
from replicator.stages.writing import Stages
from replicator.strategy.choosing import StrategyChooser
from replicator.variables import locks
from replicator.variables.creation import VariableFactory
from replicator.variables.replicated import ReplicatedVariable
from replicator.variables.storage import Settlement
from replicator.world import World


class Clock(Protocol):
    """Counts the steps of this program while others train the same variables."""

    @property
    def place(self) -> tuple[int, int]:
        """The number of this program, and how many there are."""

    def counted(self, run: Callable[[], Any], steps: int) -> Callable[[], Any]:
        """Wraps `run`: waits until that many steps may run, runs and counts them."""

    def refuse_graph(self) -> None:
        """Refuses to build a step into a function or graph."""


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """The settings and services that all steps of one Replicator share.

    Attributes:
        world: All replicas, and which of them are built here.
        options: The user's options.
        factory: Creates the variables.
        ledger: Records the writes that keep replicas equal.
        lock: Held while a step is built or run.
        peers: The processes that build the other replicas, if any.
        clock: Counts steps, if programs train the same variables asynchronously.
        stages: Where the graphs of steps are recorded while they are built.
        chooser: Decides on variables by a strategy, if there is one.
        local_statistics: Whether batch normalization in programs for one device uses
            the statistics of each replica's rows.
    """

    world: World
    options: Options
    factory: VariableFactory
    ledger: effects.Ledger
    lock: locks.StepLock
    peers: Peers | None = None
    clock: Clock | None = None
    stages: list[Stages] = dataclasses.field(default_factory=list)
    chooser: StrategyChooser | None = None
    local_statistics: bool = False


@dataclasses.dataclass(frozen=True)
class BuiltStep:
    """A step that has been built into a graph.

    Attributes:
        returned: What step_fn returned for each local replica, as tensors.
        communications: The replicas' communication, calls before gradients on each
            level of the graph.
        variables: The variables it uses, including those of other Replicators.
        writes: Whether it writes variables that have an owner.
        pulled: The bytes that replicas read of variables on the devices of others; None
            if a size is unknown.
    """

    returned: list[Any]
    communications: tuple[record.Communication, ...]
    variables: tuple[ReplicatedVariable, ...]
    writes: bool = False
    pulled: int | None = 0


@dataclasses.dataclass
class Draft:
    """A step that is being built: what its passes know so far.

    In a list with one entry per replica, `[n]` belongs to `build.world.local[n]`.

    Attributes:
        settings: What all steps of the Replicator share.
        step_fn: The user's function, of one element if there is a feed.
        feed: Gives each replica its element.
        build: The state that the replicas of this build share.
        args: Returns the extra arguments of step_fn, a tuple for each replica.
        own_args: The tensors in these arguments that belong to one replica only.
        ops_before_step: The ops that were in the graph before the step.
        ops_before_replicas: These, and the ops of the inputs.
        elements: Each replica's element, if there is a feed.
        dividing: The ops that pull a global batch and divide it, if one is given.
        extra_args: Each replica's extra arguments of step_fn, a tuple.
        settled: For each variable that a strategy has yet to decide on, by its path:
            where earlier code of the user's was built to use its components.
        returned: What step_fn returned for each replica.
        collected: The items added to the graph's collections, with the names of these.
        scopes: The name scope of each replica for which step_fn was called.
        ranges: The range of op numbers, (begin, end), of each of these replicas.
        replicas: The ops of each replica.
        active: Those that may touch a resource or have an effect; until the step is
            lowered, only of the replicas for which step_fn was called.
        first_lowered_op: The number of the first op that is added once all replicas
            are built.
        initializers: Ops that initialize variables, which are not part of the step.
        handles: Which variable has which owner.
        calls_of_all: The calls of all replicas, if other processes build some.
        communications: The replicas' communication.
        pruned: Ops that will not run, as the owner's write is made in their place.
        sharing: The handles of variables that several replicas use.
        completion: In a plain tf.Graph, an op that runs when all effects have happened.
        writes: Whether variables that have an owner are written.
    """

    settings: Settings
    step_fn: Callable[..., Any]
    feed: feeds.Feed | None
    build: context.Build
    args: Callable[[], Sequence[Any]]
    own_args: Sequence[Any] = ()
    ops_before_step: list[tf.Operation] = dataclasses.field(default_factory=list)
    ops_before_replicas: list[tf.Operation] = dataclasses.field(default_factory=list)
    elements: Any = None
    dividing: Set[tf.Operation] = frozenset()
    extra_args: Sequence[Any] = ()
    settled: Mapping[str, Settlement | None] = dataclasses.field(default_factory=dict)
    returned: list[Any] = dataclasses.field(default_factory=list)
    collected: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    scopes: list[str] = dataclasses.field(default_factory=list)
    ranges: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    replicas: Sequence[Sequence[tf.Operation]] = ()
    active: Sequence[Sequence[tf.Operation]] = ()
    first_lowered_op: int = 0
    initializers: Set[tf.Operation] = frozenset()
    handles: owners.Handles | None = None
    calls_of_all: Elsewhere | None = None
    communications: tuple[record.Communication, ...] = ()
    pruned: Set[tf.Operation] = frozenset()
    sharing: Any = ()
    completion: tf.Operation | None = None
    writes: bool = False

    @property
    def several(self) -> bool:
        """Whether there is more than one replica in all."""
        return self.build.world.num_replicas > 1

    def ops(self) -> list[tf.Operation]:
        """Returns all ops of the step, excluding those of its inputs."""
        ops: list[tf.Operation] = self.build.graph.get_operations()
        return ops[self.ranges[0][0] :]

    def leaves(self) -> list[Any]:
        """Returns the leaves of what step_fn returned, for all replicas."""
        flat: list[Any] = tf.nest.flatten(self.returned, expand_composites=True)
        return flat
