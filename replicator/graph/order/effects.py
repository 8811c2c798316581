# SPDX-License-Identifier: Apache-2.0
"""Effects of a step besides computing: writes, and tensors that leak from a replica.

Looks at the ops of a build before they are rewired and changes none of them:

- a `Ledger` records the writes on which the replicas agree, and `find_writes` finds the
  writes to variables;
- `find_leak` finds tensors that one replica took from another without communication.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from replicator._tf import functions, graphs
from replicator.graph.ir.kinds import chooses, kind_of, resource_inputs
from replicator.graph.ir.walk import waits_for

_VARIABLE_WRITERS = re.compile(
    r"Assign(Add|Sub)?VariableOp|Resource(Sparse)?Apply\w+|ResourceScatter\w+"
    r"|ResourceStridedSliceAssign|ResourceCountUpTo|Rng\w+|Stateful(?!Partitioned)\w+"
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim that the value written is equal on all replicas.

    Attributes:
        optimizer: The class of the optimizer that writes.
        wrapped: Whether its gradients are combined over the replicas.
        proven: Whether that is known; else it is yet to be proven.
    """

    optimizer: str
    wrapped: bool
    proven: bool = False


class Ledger:
    """Records the writes on which the replicas agree, or are claimed to agree.

    Writes are recorded by graph and op range. Graphs are held weakly. Nested functions
    are traced once and called by later builds, so one ledger serves all builds of a
    Replicator.
    """

    def __init__(self) -> None:
        self._ranges: weakref.WeakKeyDictionary[
            tf.Graph, list[tuple[int, int, Claim | None]]
        ]
        self._ranges = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def agreed(self, claim: Claim | None = None) -> Iterator[None]:
        """Records that ops of the default graph, created in this block, write alike.

        Args:
            claim: Who claims so; None: they agreed by communication.
        """
        graph = tf.compat.v1.get_default_graph()
        start = graphs.operation_count(graph)
        try:
            yield
        finally:
            self.enter(graph, start, graphs.operation_count(graph), claim)

    def enter(
        self, graph: tf.Graph, start: int, end: int, claim: Claim | None = None
    ) -> None:
        """Records that ops `start` to `end` of `graph` write the same everywhere."""
        self._ranges.setdefault(graph, []).append((start, end, claim))

    def optimizers_ops(self, graph: tf.Graph) -> set[tf.Operation]:
        """Returns the ops of `graph` with which wrapped optimizers write."""
        claims = self.claims(graph).items()
        return {
            op
            for op, claim in claims
            if claim is not None and claim.wrapped and not claim.proven
        }

    def claims(self, graph: tf.Graph) -> dict[tf.Operation, Claim | None]:
        """Returns the recorded ops of `graph`, with the claims that are made of them.

        An op in several blocks belongs to the innermost, which is recorded first.
        """
        ops = graph.get_operations() if graph in self._ranges else []
        claim_of: dict[tf.Operation, Claim | None] = {}
        for start, end, claim in self._ranges.get(graph, []):
            for op in ops[start:end]:
                claim_of.setdefault(op, claim)
        return claim_of


def find_writes(
    ops: Iterable[tf.Operation],
) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """Yields (op, resource) for each op that writes a variable, even in a function."""
    for op in ops:
        for index, tensor in resource_inputs(op):
            if writes(op, index):
                yield op, tensor


@functools.cache
def _is_writer(type_: str) -> bool:
    """Whether ops of a type write a variable; cached, since there are few types."""
    return bool(_VARIABLE_WRITERS.fullmatch(type_))


def may_write(op: tf.Operation) -> bool:
    """Whether an op writes a variable, or calls functions that may."""
    return _is_writer(op.type) or kind_of(op).calls


def writes_at(op: tf.Operation, index: int) -> bool:
    """Whether an op itself writes the variable behind its input `index`."""
    return index == 0 and _is_writer(op.type)


def writes(op: tf.Operation, index: int) -> bool:
    """Whether `op` writes the variable behind its input `index`.

    All resources passed to an optimizer's op count as written, as for TensorFlow.
    """
    return any(map(_is_writer, uses(op, index)))


def uses(op: tf.Operation, index: int) -> Iterator[str]:
    """Yields the types of the ops that use the resource at an op's input `index`."""
    if not kind_of(op).calls:
        yield op.type
        return
    for _, body in functions.called_graphs(op):
        inner = index - (1 if chooses(op) else 0)
        if not 0 <= inner < len(body.inputs):
            continue
        argument = body.inputs[inner]
        for consumer in argument.consumers():
            for position, tensor in enumerate(consumer.inputs):
                if tensor is argument:
                    yield from uses(consumer, position)


def find_leak(
    replicas: Sequence[Sequence[tf.Operation]],
    communicates: Callable[[tf.Operation], bool],
) -> tuple[tf.Operation, tf.Operation] | None:
    """Finds a path from one replica to another, past all communication, and back.

    Replicas are built one after the other, so a tensor can only leak to a later one
    (through a Python variable that outlives the call of step_fn). That is harmless
    unless the tensor depends on a communication, and the later replica passes something
    that depends on the tensor to a communication: the two could then wait for each
    other.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order, not rewired.
        communicates: Whether an op becomes one with those of other replicas.

    Returns:
        (the op that uses the tensor, the op that produces it), or None.
    """
    home = {op: r for r, ops in enumerate(replicas) for op in ops}
    leaks = [
        (op, source)
        for r, ops in enumerate(replicas[1:], 1)
        for op in ops
        for source in waits_for(op)
        if home.get(source, r) != r
    ]
    if not leaks:
        return None
    ops = [op for replica_ops in replicas for op in replica_ops]
    calls = {op for op in ops if communicates(op)}
    waiting = _downstream(calls, ops)
    for user, source in leaks:
        if source in waiting and _downstream({user}, ops) & calls:
            return user, source
    return None


def _downstream(
    sources: set[tf.Operation], ops: Sequence[tf.Operation]
) -> set[tf.Operation]:
    """Returns `sources` and all of `ops`, in build order, that depend on them."""
    dependents = set(sources)
    for op in ops:
        if any(source in dependents for source in waits_for(op)):
            dependents.add(op)
    return dependents
