"""What a step does besides computing: what it writes, and what leaks out of a replica.

Looks at the ops of a build before they are rewired and changes none of them:

- `find_writes` finds the writes to variables, so that the builder can refuse those that
  nobody made equal on all replicas;
- `find_leak` finds tensors that one replica took from another, past communication.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph import placeholder
from replicator.graph.kinds import kind_of, resource_inputs

_VARIABLE_WRITERS = re.compile(
    r"Assign(Add|Sub)?VariableOp|Resource(Sparse)?Apply\w+|ResourceScatter\w+"
    r"|ResourceStridedSliceAssign|ResourceCountUpTo|Rng\w+|Stateful(?!Partitioned)\w+"
)


class Ledger:
    """Where writes that keep the replicas equal are entered, by graph and op range.

    Graphs are held weakly. Nested functions are traced once and called by later builds,
    so one ledger serves all builds of a Replicator.
    """

    def __init__(self) -> None:
        self._ranges: weakref.WeakKeyDictionary[tf.Graph, list[tuple[int, int]]]
        self._ranges = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """Ops made in this block, in the default graph, write what all replicas do."""
        graph = tf.compat.v1.get_default_graph()
        start = _tf.operation_count(graph)
        try:
            yield
        finally:
            self.enter(graph, start, _tf.operation_count(graph))

    def enter(self, graph: tf.Graph, start: int, end: int) -> None:
        """Says that the ops of `graph` from `start` on write what all replicas do."""
        self._ranges.setdefault(graph, []).append((start, end))

    def agreed_ops(self, graph: tf.Graph) -> set[tf.Operation]:
        """Returns the ops of `graph` that were added in an `agreed` block."""
        ops = graph.get_operations() if graph in self._ranges else []
        return {
            op for start, end in self._ranges.get(graph, []) for op in ops[start:end]
        }


def find_writes(
    ops: Iterable[tf.Operation],
    ledger: Ledger,
    agreed: set[tf.Operation] | None = None,
) -> Iterator[tuple[tf.Operation, tf.Tensor, bool]]:
    """Finds all writes to variables.

    Args:
        ops: The ops of one replica.
        ledger: Holds the writes that are known to keep replicas equal.
        agreed: Those among them that stand in the graph of `ops`, if they were looked
            up before: that takes a time that grows with the graph.

    Yields:
        Each op that writes, the resource, and whether the write keeps replicas equal.
    """
    for op in ops:
        for index, tensor in resource_inputs(op):
            if not _writes(op, index, None):
                continue
            if agreed is None:
                agreed = ledger.agreed_ops(op.graph)
            yield op, tensor, op in agreed or not _writes(op, index, ledger)


def may_write(op: tf.Operation) -> bool:
    """Whether an op writes a variable, or calls functions that may."""
    return bool(_VARIABLE_WRITERS.fullmatch(op.type)) or kind_of(op).calls


def _writes(op: tf.Operation, index: int, ledger: Ledger | None) -> bool:
    """Whether `op` writes the variable behind its input `index`.

    With a ledger, writes inside functions that are entered there do not count.
    """
    if _VARIABLE_WRITERS.fullmatch(op.type):
        return index == 0
    for attribute, body in _tf.called_graphs(op):
        inner = index - (1 if op.type in ("If", "StatelessIf", "Case") else 0)
        if attribute == "cond" or not 0 <= inner < len(body.inputs):
            continue
        argument = body.inputs[inner]
        agreed = set() if ledger is None else ledger.agreed_ops(body)
        for consumer in argument.consumers():
            if consumer in agreed:
                continue
            for at, tensor in enumerate(consumer.inputs):
                if tensor is argument and _writes(consumer, at, ledger):
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
