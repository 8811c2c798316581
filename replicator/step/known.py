# SPDX-License-Identifier: Apache-2.0
"""What is known of a step, from stage to stage of its build.

`building.build_step` makes these values one after the other; none changes once it is
made. In a list with one entry per replica, `[n]` belongs to `build.world.local[n]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import tensorflow as tf

from replicator import context
from replicator._tf import ops as tf_ops
from replicator.cluster.peers import Peers
from replicator.graph.lowering import record
from replicator.graph.matching.elsewhere import Elsewhere
from replicator.graph.order import effects
from replicator.graph.passes import owners
from replicator.inputs import feeds
from replicator.options import Options
from replicator.stages import Stages
from replicator.strategy.choosing import StrategyChooser
from replicator.variables import locks
from replicator.variables.creation import VariableFactory
from replicator.variables.replicated import ReplicatedVariable
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


@dataclasses.dataclass(frozen=True, eq=False)
class Attempt:
    """One attempt at building a step: what is given.

    Attributes:
        settings: What all steps of the Replicator share.
        build: The state that the replicas of this attempt share.
        step_fn: The user's function, of one element if there is a feed.
        feed: Gives each replica its element.
        args: Returns the extra arguments of step_fn, a tuple for each replica.
        own_args: The tensors in these arguments that belong to one replica only.
    """

    settings: Settings
    build: context.Build
    step_fn: Callable[..., Any]
    feed: feeds.Feed | None
    args: Callable[[], Sequence[Any]]
    own_args: Sequence[Any]

    @property
    def several(self) -> bool:
        """Whether there is more than one replica in all."""
        return self.build.world.num_replicas > 1

    def variables(self) -> tuple[ReplicatedVariable, ...]:
        """Returns the variables that the step uses so far."""
        recorded = self.build.aliases.recorded().values()
        return tuple({id(variable): variable for variable in recorded}.values())


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """What step_fn is called with.

    Attributes:
        elements: Each replica's element; None for each if there is no feed.
        extra_args: Each replica's extra arguments, a tuple.
        dividing: The ops that pull a global batch and divide it, if one is given.
        begin: The number of the first op that was built for the inputs.
        end: That of the first op after them.
    """

    elements: Sequence[Any]
    extra_args: Sequence[Any]
    dividing: Set[tf.Operation]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """What calling step_fn gave; without the copies until they are made.

    Attributes:
        returned: What step_fn returned for each replica.
        replicas: The ops of each replica.
        scopes: The name scope of each replica for which step_fn was called.
        collected: The items added to the graph's collections, with the names of these.
    """

    returned: Sequence[Any]
    replicas: Sequence[Sequence[tf.Operation]]
    scopes: Sequence[str]
    collected: Sequence[tuple[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Checked:
    """What comparing the replicas told of them.

    Attributes:
        initializers: Ops that initialize variables, which are not part of the step.
        handles: Which variable has which owner.
        writes: Whether variables that have an owner are written.
        calls_of_all: The calls of all replicas, if other processes build some.
        end: The number of the first op that is added from here on.
    """

    initializers: Set[tf.Operation]
    handles: owners.Handles
    writes: bool
    calls_of_all: Elsewhere | None
    end: int


@dataclasses.dataclass(frozen=True, eq=False)
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
    writes: bool
    pulled: int | None


def ops_before(number: int, graph: Any) -> list[tf.Operation]:
    """Returns the ops of a graph that were built before op `number`, and may run."""
    ops = graph.get_operations()[:number]
    return [op for op in ops if not tf_ops.is_abandoned(op)]
