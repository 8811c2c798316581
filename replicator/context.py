# SPDX-License-Identifier: Apache-2.0
"""The replica that is being built in this thread.

The one piece of ambient state of the library: a context variable that holds the
`ReplicaContext` while a user's step_fn runs. All code that depends on the replica
(primitives, variables, optimizers) asks `current()`; nothing else is global.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import tensorflow as tf

from replicator import errors
from replicator._tf import traces as tf_traces
from replicator.graph.ir.placeholder import Gradient, PrimitiveFacts
from replicator.graph.order.effects import Claim, Ledger
from replicator.graph.passes.owners import Aliases
from replicator.options import Options
from replicator.world import World

_Block = contextlib.AbstractContextManager[None]
_State = TypeVar("_State")
_current: contextvars.ContextVar[ReplicaContext | None] = contextvars.ContextVar(
    "replicator_replica", default=None
)


class BuildAgain(BaseException):
    """Raised by a build that has learned facts which it needed from its start.

    The builder catches it, discards the graph built so far and builds the step once
    more; `Build.knowledge` keeps what was learned. It is a BaseException, so that a
    user's own `except Exception` in a step does not swallow it.
    """


class Waiting(BaseException):
    """Raised by a replica that needs an object which a later replica provides.

    The builder goes on with the other replicas. The object that the replica itself
    provides is in `Build.knowledge`; see step/objects.py.
    """


@dataclasses.dataclass
class Created:
    """A variable created in a step, through all attempts at building the step.

    Attributes:
        variable: The ReplicatedVariable.
        new: Whether it was created anew, not found again by a later replica or build.
        line: The user's line that first writes it, if any does.
        writes: The number of writes, by the number of the attempt and the replica.
    """

    variable: Any
    new: bool
    line: str | None = None
    writes: collections.Counter[tuple[int, int]] = dataclasses.field(
        default_factory=collections.Counter
    )


class States:
    """The state of features while a step is built: an object of one class for each.

    So a feature can be understood from its own file, and nothing here names any.
    """

    def __init__(self) -> None:
        self._states: dict[type, Any] = {}

    def of(self, kind: type[_State]) -> _State:
        """Returns the object of a class, which is created on first use."""
        if kind not in self._states:
            self._states[kind] = kind()
        found: _State = self._states[kind]
        return found


@dataclasses.dataclass
class Build:
    """The state that all replicas of one build of a step share.

    Attributes:
        world: All replicas, and which of them are built here.
        options: The user's options.
        graph: The tf.Graph (or FuncGraph) that the step is built into.
        ledger: Records the writes to variables that keep the replicas equal.
        knowledge: Facts learned in earlier attempts at this build.
        aliases: The handles by which replicas use variables that one of them owns.
        states: The state of features that all replicas of one attempt share.
        in_functions: Whether a replica communicates in the graph of a function, which
            may not become part of the step.
        step_key: Identifies step_fn in all builds of it, and is freed with it.
        gradients: The dual of each primitive, by its name.
        facts: What passes need to know of each primitive, by its name.
        traces: The traces of the user's tf.functions that belong to this build.
        created: The variables that step_fn has created in all attempts, by their keys.
        number: Unique per build: a tf.function traced in another build would
            communicate at that build's places.
    """

    world: World
    options: Options
    graph: Any
    ledger: Ledger
    aliases: Aliases
    gradients: Mapping[str, Gradient]
    facts: Mapping[str, PrimitiveFacts]
    knowledge: dict[Any, Any] = dataclasses.field(default_factory=dict)
    states: States = dataclasses.field(default_factory=States)
    in_functions: bool = False
    step_key: Any = None
    traces: tf_traces.Traces = dataclasses.field(default_factory=tf_traces.Traces)
    created: dict[str, Created] = dataclasses.field(default_factory=dict)
    number: int = dataclasses.field(default_factory=itertools.count().__next__)

    @property
    def traced(self) -> tuple[int, ...]:
        """The local replicas for which step_fn is called; the others are copies."""
        copies = self.options.build == "clone"
        return self.world.local[:1] if copies else self.world.local

    @property
    def compared(self) -> tuple[int, ...]:
        """The local replicas that are compared: of copies, which are equal, the first.

        A copy shows what differs between the replicas as well as a call of step_fn.
        """
        return self.world.local if self.all_traced else self.world.local[:2]

    @property
    def all_traced(self) -> bool:
        """Whether no replica is a copy, so that each may differ in the graph."""
        return self.traced == self.world.local

    def create(self, variable: Any, new: bool) -> None:
        """Records that step_fn creates a variable, be it new or known from before.

        Args:
            variable: The ReplicatedVariable.
            new: Whether this call created it; False if an earlier build or replica did.
        """
        created = self.created.setdefault(variable.key, Created(variable, new))
        created.new = new

    def refuse_copies(self, subject: str) -> None:
        """Raises CloneError if `subject` is asked for by a replica that will be copied.

        Args:
            subject: A value that would differ on each of the copies, e.g. "replica_id".
        """
        if not self.all_traced:
            raise errors.CloneError(
                f'with build="clone", {subject} cannot be known: step_fn is called '
                f"once, and {self.world.num_local - 1} of "
                f"{self.world.num_local} replicas are copies.",
                fix="pass values that differ through the inputs, as tensors (an "
                "input_fn knows ctx.replica_id); or build each replica "
                'separately with build="trace".',
            )


@dataclasses.dataclass(frozen=True)
class Mode:
    """What the library has declared of the code that is running.

    Attributes:
        updating: Whether updates are made that are equal on all replicas by
            construction, so that no assignment needs to communicate.
        writing: The assignment in progress while the replicas agree on its value: the
            variable's name, the method, and the variable's unique key. All replicas
            must make the same one.
        backward: Whether a gradient is being built.
        merging: Whether variables that differ are read as their aggregate.
    """

    updating: bool = False
    writing: tuple[str, str, str] | None = None
    backward: bool = False
    merging: bool = False


class _Counts(collections.Counter[Any]):
    """How often a replica has passed each place, by any hashable key."""


@dataclasses.dataclass
class ReplicaContext:
    """The replica whose step_fn is running in this thread.

    Attributes:
        build: What it shares with the other replicas.
        replica_id: Its id, one of `build.world.local`.
        scope: The name scope of the replica's sub-graph, with the final "/".
        depth: The depth of the Python stack at which step_fn is called.
        trace_anew: Has tf.functions that were traced for this replica traced again.
        shard: The replica's part of a global batch, an `inputs.shards.Shard`.
        mode: What the library has declared of the code that is running.
        states: The state of features for this replica.
    """

    build: Build
    replica_id: int
    scope: str = ""
    depth: int = 0
    trace_anew: Callable[[], None] = lambda: None
    shard: Any = None
    mode: Mode = Mode()
    states: States = dataclasses.field(default_factory=States)

    @property
    def share(self) -> Any:
        """This replica's share of the examples of a global batch, a float64 scalar.

        The shares of all replicas add up to 1. None if inputs are not divided.
        """
        return None if self.shard is None else self.shard.share

    @property
    def examples(self) -> Any:
        """The number of this replica's examples, a float32 scalar.

        None if it is unknown, or known to be equal on all replicas.
        """
        if self.shard is None:
            return None
        count, total = map(tf.get_static_value, (self.shard.count, self.shard.total))
        if None not in (count, total) and count * self.num_replicas == total:
            return None
        return tf.cast(self.shard.count, tf.float32)

    @property
    def device(self) -> str:
        """The device on which this replica is built."""
        return self.build.world.device(self.replica_id)

    @property
    def num_replicas(self) -> int:
        """The number of replicas in all."""
        return self.build.world.num_replicas

    @property
    def is_outermost(self) -> bool:
        """Whether ops are being added to the step itself, not to a function in it."""
        return tf.compat.v1.get_default_graph() is self.build.graph

    def count(self, key: Any) -> int:
        """Returns how often `key` was counted before, and counts it once more."""
        counts = self.states.of(_Counts)
        counts[key] += 1
        return counts[key] - 1

    def counted(self, key: Any) -> int:
        """Returns how often `key` was counted."""
        return self.states.of(_Counts)[key]

    @contextlib.contextmanager
    def equal_updates(
        self, optimizer: str = "an optimizer", proven: bool = False
    ) -> Iterator[None]:
        """Declares assignments in this block equal on all replicas.

        Args:
            optimizer: The class that assigns, for messages.
            proven: Whether it is known from elsewhere; otherwise it is proven later.
        """
        agreed = self.build.ledger.agreed(Claim(optimizer, True, proven))
        with self._setting(updating=True), agreed:
            yield

    def agreeing_on(self, name: str, method: str, key: str) -> _Block:
        """Makes the replicas agree, in this block, on the value written to a variable.

        Args:
            name: The variable's name.
            method: The method that writes it, e.g. "assign_add".
            key: The variable's unique key.
        """
        # The outermost method: "scatter_add" calls an assign.
        return self._setting(writing=self.mode.writing or (name, method, key))

    def reading_merged(self, merged: bool = True) -> _Block:
        """Sets whether this block reads variables that differ as their aggregate."""
        return self._setting(merging=merged)

    @contextlib.contextmanager
    def creating_for_all(self) -> Iterator[None]:
        """Creates a new variable each time in this block, whichever replica is built.

        Inside a step, variables that replicas create at one place in the code are one
        variable. But an object shared by all replicas creates each of its variables
        once, and all at one place: a later build or replica creates the next of them
        there.
        """
        scope = tf.compat.v1.get_default_graph().get_name_scope() + "/"
        scope = scope.removeprefix(self.scope)
        with building(None), tf.name_scope(scope if scope != "/" else ""):
            yield

    def backward_pass(self) -> _Block:
        """Marks communication calls in this block as part of a gradient."""
        return self._setting(backward=True)

    @contextlib.contextmanager
    def _setting(self, **fields: Any) -> Iterator[None]:
        """Changes the mode in a block."""
        saved, self.mode = self.mode, dataclasses.replace(self.mode, **fields)
        try:
            yield
        finally:
            self.mode = saved


def current() -> ReplicaContext | None:
    """Returns the replica being built in this thread, or None outside a step."""
    return _current.get()


def will_be_copied() -> bool:
    """Whether a replica is being built of which others will be copies.

    The devices of variables are then hidden from TensorFlow's code: they differ between
    replicas, and with them the ops of tf.nn.embedding_lookup_sparse, which follow the
    table's device, and the order in which legacy Keras optimizers update variables.
    """
    replica = _current.get()
    return replica is not None and not replica.build.all_traced


def require(caller: str) -> ReplicaContext:
    """Returns the replica being built.

    Args:
        caller: The name of the caller, for the message, e.g. "all_reduce".

    Raises:
        ContextError: No step is being built in this thread.
    """
    replica = _current.get()
    if replica is None:
        error = errors.ContextError(
            f"{caller} was called outside a step.",
            fix="call it inside the step_fn that you pass to Replicator.run or "
            "Replicator.build; a gradient through a communication must be taken inside "
            "the step as well.",
        )
        error.outside = (caller, errors.user_line())
        raise error
    return replica


@contextlib.contextmanager
def building(replica: ReplicaContext | None) -> Iterator[None]:
    """Makes `replica`, or None, the replica that this thread builds in this block."""
    token = _current.set(replica)
    try:
        yield
    finally:
        _current.reset(token)
