# SPDX-License-Identifier: Apache-2.0
"""Which replica is being built in this thread.

The one piece of ambient state of the library: a context variable that holds the
`ReplicaContext` while a user's step_fn runs. Everything that must know "who am I"
(primitives, variables, optimizers) asks `current()`; nothing else is global.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.graph.ir.placeholder import Facts, Gradient
from replicator.graph.order.effects import Claim, Ledger
from replicator.graph.passes.owners import Aliases
from replicator.graph.passes.reads import Recent
from replicator.options import Options
from replicator.world import World

_current: contextvars.ContextVar[ReplicaContext | None] = contextvars.ContextVar(
    "replicator_replica", default=None
)


class BuildAgain(BaseException):
    """Raised by a build that has learned what it should have known from its start.

    The builder catches it, discards what was built and builds the step once more;
    `Build.knowledge` keeps what was learned. A BaseException, so that a user's own
    `except Exception` in a step does not swallow it.
    """


class Waiting(BaseException):
    """Raised by a replica that lacks what later replicas have to say.

    The builder goes on with the others. What the replica itself had to say is in
    `Build.knowledge`; see step/objects.py.
    """


@dataclasses.dataclass
class Created:
    """A variable that is created in a step, through all attempts at building it.

    Attributes:
        variable: The ReplicatedVariable.
        new: Whether this build is the first to create it, on this replica the first.
        line: Where it is written first, if it is.
        writes: How often, by the number of the attempt and the replica.
    """

    variable: Any
    new: bool
    line: str | None = None
    writes: collections.Counter[tuple[int, int]] = dataclasses.field(
        default_factory=collections.Counter
    )


@dataclasses.dataclass
class Build:
    """What all replicas of one build of a step share.

    Attributes:
        world: All replicas there are, and those that are built.
        options: What the user chose.
        graph: The tf.Graph (or FuncGraph) that the step is built into.
        ledger: Where writes to variables that keep the replicas equal are entered.
        knowledge: Facts learned in an earlier attempt at this build.
        aliases: The handles by which replicas use variables that one of them owns.
        findings: Facts that replicas leave for later replicas of the same attempt.
        in_functions: Whether a replica communicates in a graph of a function, which may
            be no part of the step in the end.
        step_key: Stands for step_fn in all builds of it, and goes with it.
        messages: Whether a replica sends something to one other.
        gradients: The dual of each primitive, by its name.
        facts: What passes ask of each primitive, by its name.
        traces: What tf.functions of the user's keep of this build until it is done.
        created: The variables that step_fn has created in all attempts, by their keys.
        number: Tells this build from all others; what a tf.function traced for another
            one communicates in the places of that one.
    """

    world: World
    options: Options
    graph: Any
    ledger: Ledger
    aliases: Aliases
    gradients: Mapping[str, Gradient]
    facts: Mapping[str, Facts]
    knowledge: dict[Any, Any] = dataclasses.field(default_factory=dict)
    findings: dict[Any, Any] = dataclasses.field(default_factory=dict)
    in_functions: bool = False
    messages: bool = False
    step_key: Any = None
    traces: _tf.Traces = dataclasses.field(default_factory=_tf.Traces)
    created: dict[str, Created] = dataclasses.field(default_factory=dict)
    number: int = dataclasses.field(default_factory=itertools.count().__next__)

    @property
    def traced(self) -> tuple[int, ...]:
        """The local replicas for which step_fn is called; the others are copies."""
        copies = self.options.build == "clone"
        return self.world.local[:2] if copies else self.world.local

    def create(self, variable: Any, new: bool) -> None:
        """Notes that step_fn creates a variable, or one that an earlier build did.

        Args:
            variable: The ReplicatedVariable.
            new: Whether it exists from now on.
        """
        created = self.created.setdefault(variable.key, Created(variable, new))
        created.new = new

    def refuse_copies(self, what: str) -> None:
        """Raises CloneError if a replica whose copies there will be asks for `what`.

        Args:
            what: What would be another one on each of the copies, e.g. "replica_id".
        """
        if self.traced != self.world.local:
            raise errors.CloneError(
                errors.compose(
                    f'with build="clone", {what} cannot be known: step_fn is called '
                    f"for replicas 0 and 1, and the other "
                    f"{self.world.num_local - 2} are copies.",
                    [f"at {errors.user_line()}"],
                    "pass what differs by the inputs, as a tensor (an input_fn "
                    "knows ctx.replica_id); or build every replica by itself, "
                    'build="trace".',
                )
            )


@dataclasses.dataclass
class ReplicaContext:
    """The replica whose step_fn is running in this thread.

    Attributes:
        build: What it shares with its siblings.
        replica_id: One of those that are built here, build.world.local.
        updating: True while updates are made that are equal on all replicas by
            construction, so that no assignment needs to communicate.
        writing: What is being assigned to, and how, while the replicas agree on the
            value: the variable's name, the method, and what tells the variable from all
            others. All replicas must write the same.
        backward: True while a gradient is being built.
        counts: How often the replica passed each place, by any hashable key.
        scope: The name scope of the replica's sub-graph, with the final "/".
        depth: The depth of the Python stack at which step_fn is called.
        trace_anew: Has tf.functions that were traced for this replica traced anew.
        receipts: A scalar zero for each call that handed something to other replicas
            and received nothing, for `Replicator.linked`.
        reads: What it has read of variables.
        shard: What the replica was dealt of a global batch, an `inputs.shards.Shard`.
        taken: The gradients of its calls that were taken, where replicas may have
            different numbers of examples; see primitives/weighing.py.
        claims: Which optimizer has applied which of them, by the keys of the calls and
            the numbers of their gradients.
        weighed: The optimizers whose loss is multiplied already by what the replica
            weighs, by their ids, until they apply its gradients.
        synchronizes: Returns a gradient that is being taken as it counts in the sum of
            all replicas', if gradients of variables are made equal as they are read;
            given whether it leads through another gradient. None, if nothing is so.
        agrees: Returns what is written to a variable in place of a replica's own value,
            or None where a mean will do; None, if nothing is known of such values.
        reading: Of these, the identities through which variables are being read.
    """

    build: Build
    replica_id: int
    scope: str = ""
    depth: int = 0
    updating: bool = False
    writing: tuple[str, str, str] | None = None
    backward: bool = False
    counts: dict[Any, int] = dataclasses.field(default_factory=dict)
    trace_anew: Callable[[], None] = lambda: None
    receipts: list[Any] = dataclasses.field(default_factory=list)
    reads: Recent = dataclasses.field(default_factory=Recent)
    shard: Any = None
    taken: list[Any] = dataclasses.field(default_factory=list)
    claims: dict[tuple[str, int], Any] = dataclasses.field(default_factory=dict)
    weighed: set[int] = dataclasses.field(default_factory=set)
    synchronizes: Callable[[Any, bool], Any] | None = None
    agrees: Callable[[Any, Any], Any] | None = None
    reading: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def weight(self) -> Any:
        """What means over the replicas weigh this one by, or None if all weigh alike.

        The replica's share of the examples of the global batch, a float32 scalar. All
        replicas' add up to 1 in every step, so that steps weigh alike.
        """
        if self.shard is None:
            return None
        count = tf.cast(self.shard.count, tf.float32)
        return tf.math.divide_no_nan(count, tf.cast(self.shard.total, tf.float32))

    @property
    def examples(self) -> Any:
        """How many examples the replica was dealt, a float32 scalar.

        None if that is not known, or known to be equal on all replicas.
        """
        if self.shard is None:
            return None
        count, total = map(tf.get_static_value, (self.shard.count, self.shard.total))
        if None not in (count, total) and count * self.num_replicas == total:
            return None
        return tf.cast(self.shard.count, tf.float32)

    @property
    def device(self) -> str:
        """Where this replica is built."""
        return self.build.world.device(self.replica_id)

    @property
    def num_replicas(self) -> int:
        """How many replicas there are in all."""
        return self.build.world.num_replicas

    def count(self, key: Any) -> int:
        """Returns how often `key` was counted before, and counts it once more."""
        seen = self.counts.get(key, 0)
        self.counts[key] = seen + 1
        return seen

    @contextlib.contextmanager
    def equal_updates(self, optimizer: str = "an optimizer") -> Iterator[None]:
        """In this block, assignments are equal on all replicas; it is proven later.

        Args:
            optimizer: Who assigns, for messages.
        """
        before, self.updating = self.updating, True
        try:
            with self.build.ledger.agreed(Claim(optimizer, wrapped=True)):
                yield
        finally:
            self.updating = before

    @contextlib.contextmanager
    def agreeing_on(self, name: str, method: str, key: str) -> Iterator[None]:
        """In this block, the replicas agree on what is written to a variable.

        Args:
            name: The variable's.
            method: By which it is written, e.g. "assign_add".
            key: Tells the variable from all others.
        """
        before = self.writing
        self.writing = before or (name, method, key)  # "scatter_add" ends in an assign
        try:
            yield
        finally:
            self.writing = before

    @contextlib.contextmanager
    def weighing(self, shard: Any) -> Iterator[None]:
        """In this block, means over the replicas weigh this one by its examples.

        Wrapped optimizers do so, unless they are given a weight.

        Args:
            shard: What the replica was dealt of a global batch, with its number of
                examples and that of the batch.
        """
        before, self.shard = self.shard, shard
        try:
            yield
        finally:
            self.shard = before

    @contextlib.contextmanager
    def creating_for_all(self) -> Iterator[None]:
        """In this block, a new variable is a new one, whichever replica is being built.

        Inside a step, variables that replicas create at one place of the code are one.
        But an object that all replicas use creates each of its variables once, and at
        one place: in a later build, or on a later replica, that is the next of them.
        """
        scope = tf.compat.v1.get_default_graph().get_name_scope() + "/"
        scope = scope.removeprefix(self.scope)
        with building(None), tf.name_scope(scope if scope != "/" else ""):
            yield

    @contextlib.contextmanager
    def backward_pass(self) -> Iterator[None]:
        """In this block, communication calls belong to a gradient."""
        before, self.backward = self.backward, True
        try:
            yield
        finally:
            self.backward = before


def current() -> ReplicaContext | None:
    """Returns the replica being built in this thread, or None outside a step."""
    return _current.get()


def require(what: str) -> ReplicaContext:
    """Returns the replica being built.

    Args:
        what: What was called, for the message, e.g. "all_reduce".

    Raises:
        ContextError: No step is being built in this thread.
    """
    replica = _current.get()
    if replica is None:
        error = errors.ContextError(
            errors.compose(
                f"{what} was called outside a step.",
                fix="call it inside the step_fn that you hand to Replicator.run or "
                "Replicator.build; a gradient through a communication must be taken "
                "inside the step as well.",
            )
        )
        error.outside = (what, errors.user_line())
        raise error
    return replica


@contextlib.contextmanager
def building(replica: ReplicaContext | None) -> Iterator[None]:
    """In this block, `replica` is being built in this thread; none is, if None."""
    token = _current.set(replica)
    try:
        yield
    finally:
        _current.reset(token)
