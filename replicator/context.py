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
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.graph.ir.placeholder import Facts, Gradient
from replicator.graph.order.effects import Claim, Ledger
from replicator.graph.passes.owners import Aliases
from replicator.graph.passes.reads import Recent
from replicator.options import Options
from replicator.world import World

_Block = contextlib.AbstractContextManager[None]
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
        findings: Facts that replicas leave for later replicas of the same attempt.
        in_functions: Whether a replica communicates in the graph of a function, which
            may not become part of the step.
        step_key: Identifies step_fn in all builds of it, and is freed with it.
        messages: Whether any replica sends a message to another.
        gradients: The dual of each primitive, by its name.
        facts: What passes need to know of each primitive, by its name.
        traces: What the user's tf.functions keep of this build until it is done.
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

    @property
    def all_traced(self) -> bool:
        """Whether no replica is a copy, so that each may differ in the graph."""
        return self.traced == self.world.local

    def create(self, variable: Any, new: bool) -> None:
        """Notes that step_fn creates a variable, whether new or known from before.

        Args:
            variable: The ReplicatedVariable.
            new: Whether this call created it; False if an earlier build or replica did.
        """
        created = self.created.setdefault(variable.key, Created(variable, new))
        created.new = new

    def refuse_copies(self, what: str) -> None:
        """Raises CloneError if `what` is asked for by a replica that will be copied.

        Args:
            what: A value that would differ on each of the copies, e.g. "replica_id".
        """
        if not self.all_traced:
            raise errors.CloneError(
                errors.compose(
                    f'with build="clone", {what} cannot be known: step_fn is called '
                    f"for replicas 0 and 1, and the other "
                    f"{self.world.num_local - 2} are copies.",
                    [f"at {errors.user_line()}"],
                    "pass values that differ through the inputs, as tensors (an "
                    "input_fn knows ctx.replica_id); or build each replica "
                    'separately with build="trace".',
                )
            )


@dataclasses.dataclass
class ReplicaContext:
    """The replica whose step_fn is running in this thread.

    Attributes:
        build: What it shares with the other replicas.
        replica_id: Its id, one of `build.world.local`.
        updating: True while updates are made that are equal on all replicas by
            construction, so that no assignment needs to communicate.
        writing: The assignment in progress while the replicas agree on its value: the
            variable's name, the method, and the variable's unique key. All replicas
            must make the same one.
        backward: True while a gradient is being built.
        counts: How often the replica has passed each place, by any hashable key.
        scope: The name scope of the replica's sub-graph, with the final "/".
        depth: The depth of the Python stack at which step_fn is called.
        trace_anew: Has tf.functions that were traced for this replica traced again.
        receipts: A scalar zero for each call that sent something to other replicas and
            received nothing, for `Replicator.linked`.
        reads: What it has read of variables.
        shard: The replica's part of a global batch, an `inputs.shards.Shard`.
        taken: The gradients of its calls that were computed, where replicas may have
            different numbers of examples; see primitives/weighing.py.
        claims: The optimizer that has applied each of these gradients, by the key of
            the call and the number of its gradient.
        combined: The sums over replicas that step_fn took by itself, by their ids.
        weights: The tensors that `weight` has returned, by their ids.
        weighed: The ids of optimizers whose loss is already multiplied by the replica's
            weight, until they apply its gradients.
        merging: True while variables that differ are read as their aggregate.
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
    combined: dict[int, Any] = dataclasses.field(default_factory=dict)
    weights: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    weighed: set[int] = dataclasses.field(default_factory=set)
    merging: bool = False

    @property
    def weight(self) -> Any:
        """This replica's weight in means over the replicas, or None if all are equal.

        It is the replica's share of the examples of the global batch, a float32 scalar
        for users: what the library computes uses `share`. The weights of all replicas
        add up to 1 in every step, so that steps weigh the same.
        """
        if self.shard is None:
            return None
        share = self.share
        weight = tf.cast(share, tf.float32)
        for tensor in (weight, share):  # held, as they are looked up by their ids
            self.weights[id(tensor)] = tensor, share
        return weight

    @property
    def share(self) -> Any:
        """This replica's weight as a float64 scalar, or None; see `weight`."""
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
        seen = self.counts.get(key, 0)
        self.counts[key] = seen + 1
        return seen

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
        return self._setting(writing=self.writing or (name, method, key))

    def reading_merged(self, merged: bool = True) -> _Block:
        """Reads variables that differ as their aggregate in this block, or does not."""
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
        """Sets fields in a block."""
        before = {name: getattr(self, name) for name in fields}
        vars(self).update(fields)
        try:
            yield
        finally:
            vars(self).update(before)


def current() -> ReplicaContext | None:
    """Returns the replica being built in this thread, or None outside a step."""
    return _current.get()


def will_be_copied() -> bool:
    """Whether a replica is being built of which further ones will be copies.

    The devices of variables are then told to no code of TensorFlow's: which of them is
    the replica's differs, and so do what tf.nn.embedding_lookup_sparse builds where the
    table's is, and the order in which legacy Keras optimizers go through all of them.
    """
    replica = _current.get()
    return replica is not None and not replica.build.all_traced


def require(what: str) -> ReplicaContext:
    """Returns the replica being built.

    Args:
        what: The name of the caller, for the message, e.g. "all_reduce".

    Raises:
        ContextError: No step is being built in this thread.
    """
    replica = _current.get()
    if replica is None:
        error = errors.ContextError(
            errors.compose(
                f"{what} was called outside a step.",
                fix="call it inside the step_fn that you pass to Replicator.run or "
                "Replicator.build; a gradient through a communication must be taken "
                "inside the step as well.",
            )
        )
        error.outside = (what, errors.user_line())
        raise error
    return replica


@contextlib.contextmanager
def building(replica: ReplicaContext | None) -> Iterator[None]:
    """Makes `replica`, or none, the one that is built in this thread, in this block."""
    token = _current.set(replica)
    try:
        yield
    finally:
        _current.reset(token)
