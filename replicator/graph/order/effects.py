# SPDX-License-Identifier: Apache-2.0
"""What a step does besides computing: what it writes, and what leaks out of a replica.

Looks at the ops of a build before they are rewired and changes none of them:

- a `Ledger` keeps which writes the replicas agree on, and `find_writes` finds the
  writes to variables;
- `find_leak` finds tensors that one replica took from another, past communication.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import chooses, kind_of, resource_inputs

_VARIABLE_WRITERS = re.compile(
    r"Assign(Add|Sub)?VariableOp|Resource(Sparse)?Apply\w+|ResourceScatter\w+"
    r"|ResourceStridedSliceAssign|ResourceCountUpTo|Rng\w+|Stateful(?!Partitioned)\w+"
)


@dataclasses.dataclass(frozen=True)
class Claim:
    """Says who says that what is written is equal on all replicas, without proof.

    Attributes:
        optimizer: The class of the optimizer that writes.
        wrapped: Whether it was given gradients that are combined.
    """

    optimizer: str
    wrapped: bool


class Ledger:
    """Where writes are entered on which the replicas agree, or are said to agree.

    By graph and op range. Graphs are held weakly. Nested functions are traced once and
    called by later builds, so one ledger serves all builds of a Replicator.
    """

    def __init__(self) -> None:
        self._ranges: weakref.WeakKeyDictionary[
            tf.Graph, list[tuple[int, int, Claim | None]]
        ]
        self._ranges = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def agreed(self, claim: Claim | None = None) -> Iterator[None]:
        """Ops made in this block, in the default graph, write what all replicas do.

        Args:
            claim: Who says so, if that is still to be proven.
        """
        graph = tf.compat.v1.get_default_graph()
        start = _tf.operation_count(graph)
        try:
            yield
        finally:
            self.enter(graph, start, _tf.operation_count(graph), claim)

    def enter(
        self, graph: tf.Graph, start: int, end: int, claim: Claim | None = None
    ) -> None:
        """Says that the ops of `graph` from `start` on write what all replicas do."""
        self._ranges.setdefault(graph, []).append((start, end, claim))

    def agreed_ops(self, graph: tf.Graph) -> set[tf.Operation]:
        """Returns the ops of `graph` of which it is known that the replicas agree."""
        return {op for op, claim in self.claims(graph).items() if claim is None}

    def optimizers_ops(self, graph: tf.Graph) -> set[tf.Operation]:
        """Returns the ops of `graph` by which wrapped optimizers write."""
        claims = self.claims(graph).items()
        return {op for op, claim in claims if claim is not None and claim.wrapped}

    def claims(self, graph: tf.Graph) -> dict[tf.Operation, Claim | None]:
        """Returns the ops of `graph` that were entered, with what is to be proven.

        An op in several blocks belongs to the innermost, which is entered first.
        """
        ops = graph.get_operations() if graph in self._ranges else []
        found: dict[tf.Operation, Claim | None] = {}
        for start, end, claim in self._ranges.get(graph, []):
            for op in ops[start:end]:
                found.setdefault(op, claim)
        return found


def find_writes(
    ops: Iterable[tf.Operation],
) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """Yields each op that writes a variable, also in a function, and the resource."""
    for op in ops:
        for index, tensor in resource_inputs(op):
            if writes(op, index):
                yield op, tensor


@functools.cache
def _is_writer(type_: str) -> bool:
    """Whether ops of a type write a variable; asked of each op, for few types."""
    return bool(_VARIABLE_WRITERS.fullmatch(type_))


def may_write(op: tf.Operation) -> bool:
    """Whether an op writes a variable, or calls functions that may."""
    return _is_writer(op.type) or kind_of(op).calls


def writes_at(op: tf.Operation, index: int) -> bool:
    """Whether an op itself writes the variable behind its input `index`."""
    return index == 0 and _is_writer(op.type)


def writes(op: tf.Operation, index: int) -> bool:
    """Whether `op` writes the variable behind its input `index`.

    Of what an optimizer's op is given, TensorFlow counts all as written, as it should.
    """
    if not kind_of(op).calls:
        return _is_writer(op.type)
    for attribute, body in _tf.called_graphs(op):
        inner = index - (1 if chooses(op) else 0)
        if attribute == "cond" or not 0 <= inner < len(body.inputs):
            continue
        argument = body.inputs[inner]
        for consumer in argument.consumers():
            for at, tensor in enumerate(consumer.inputs):
                if tensor is argument and writes(consumer, at):
                    return True
    return False


def find_leak(
    replicas: Sequence[Sequence[tf.Operation]],
) -> tuple[tf.Operation, tf.Operation] | None:
    """Finds a path from one replica into another, past all communication, and back.

    Replicas are built one after the other, so a tensor can only leak to a later one (by
    a Python variable that outlives the call of step_fn). That is harmless unless what
    leaks depends on a communication, and the later replica hands something that depends
    on it to a communication: the two could then wait for each other.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order, not rewired.

    Returns:
        (the op that uses the tensor, the op that makes it), or None.
    """
    home = {op: r for r, ops in enumerate(replicas) for op in ops}
    leaks = [
        (op, source)
        for r, ops in enumerate(replicas[1:], 1)
        for op in ops
        for source in _sources(op)
        if home.get(source, r) != r
    ]
    if not leaks:
        return None
    ops = [op for own in replicas for op in own]
    calls = {op for op in ops if placeholder.read(op) is not None}
    waiting = _downstream(calls, ops)
    for taker, giver in leaks:
        if giver in waiting and _downstream({taker}, ops) & calls:
            return taker, giver
    return None


def _downstream(
    sources: set[tf.Operation], ops: Sequence[tf.Operation]
) -> set[tf.Operation]:
    """Returns `sources` and all of `ops`, given in build order, that depend on them."""
    found = set(sources)
    for op in ops:
        if any(source in found for source in _sources(op)):
            found.add(op)
    return found


def _sources(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that `op` waits for."""
    return [*[tensor.op for tensor in op.inputs], *op.control_inputs]
