"""What a step does besides computing: which writes it makes, in which order they happen.

Three passes over the ops of a build, after it is rewired:

- `find_writes` finds the writes to variables, so that the builder can refuse those that
  nobody made equal on all replicas;
- `order_within_replicas` keeps side effects in program order inside a replica, and only
  there: TensorFlow's own order runs across replicas and would make a cycle with the
  communication;
- `order_in_session` does for a plain tf.Graph what automatic control dependencies do in
  a function: all effects of the step happen, in order, when an output is fetched.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph import placeholder

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
        """Ops added to the default graph in this block write what all replicas write."""
        graph = tf.compat.v1.get_default_graph()
        start = _tf.operation_count(graph)
        try:
            yield
        finally:
            ranges = self._ranges.setdefault(graph, [])
            ranges.append((start, _tf.operation_count(graph)))

    def agreed_ops(self, graph: tf.Graph) -> set[tf.Operation]:
        """Returns the ops of `graph` that were added in an `agreed` block."""
        ops = graph.get_operations() if graph in self._ranges else []
        return {
            op for start, end in self._ranges.get(graph, []) for op in ops[start:end]
        }


def find_writes(
    ops: Iterable[tf.Operation], ledger: Ledger
) -> Iterator[tuple[tf.Operation, tf.Tensor, bool]]:
    """Finds all writes to variables.

    Args:
        ops: The ops of one replica.
        ledger: Holds the writes that are known to keep replicas equal.

    Yields:
        Each op that writes, the resource, and whether the write keeps replicas equal.
    """
    agreed: set[tf.Operation] | None = None
    for op in ops:
        for index, tensor in enumerate(op.inputs):
            if tensor.dtype != tf.resource or not _writes(op, index, None):
                continue
            if agreed is None:
                agreed = ledger.agreed_ops(op.graph)
            yield op, tensor, op in agreed or not _writes(op, index, ledger)


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


def order_within_replicas(replicas: Sequence[Sequence[tf.Operation]]) -> None:
    """Orders effects that touch no resource inside each replica only.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order; ops of the
            lowered communication may be passed as replicas of their own.
    """
    for ops in replicas:
        last: tf.Operation | None = None
        for op in ops:
            if not _tf.is_stateful(op):
                continue
            if any(t.dtype == tf.resource for t in op.inputs):
                continue  # ordered by the resource, which belongs to one replica
            _tf.run_independently(op.graph, op)
            if last is not None:
                _tf.add_control_inputs(op, [last])
            last = op


def order_in_session(
    ops: Sequence[tf.Operation], initializers: set[tf.Operation]
) -> list[tf.Operation]:
    """Puts the effects of one replica in program order, in a plain tf.Graph.

    Args:
        ops: The ops of one replica, in build order.
        initializers: Ops that initialise variables, which are no part of the step.

    Returns:
        The ops that must run in each step.
    """
    last_write: dict[object, tf.Operation] = {}
    reads: dict[object, list[tf.Operation]] = {}
    must_run = []
    for op in ops:
        if op in initializers:
            continue
        stateful = _tf.is_stateful(op)
        read, written = _tf.resources_touched(op)
        touched: list[tuple[object, bool]] = [(key, False) for key in read]
        touched += [(key, True) for key in written]
        if stateful and not touched:
            touched = [(None, True)]
        before: set[tf.Operation] = set()
        for key, writes in touched:
            if key in last_write:
                before.add(last_write[key])
            if writes:
                before.update(reads.pop(key, ()))
                last_write[key] = op
            else:
                reads.setdefault(key, []).append(op)
        before.discard(op)
        _tf.add_control_inputs(op, sorted(before, key=lambda o: o.name))
        if stateful and (written or not read):
            must_run.append(op)
    return must_run


def find_leak(
    replicas: Sequence[Sequence[tf.Operation]],
) -> tuple[tf.Operation, tf.Operation] | None:
    """Finds a path from one replica into another, past all communication, and back.

    Replicas are built one after the other, so a tensor can only leak to a later one (by
    a Python variable that outlives the call of step_fn). That is harmless unless the
    later replica hands something that depends on it to a communication, whose result
    the earlier replica's tensor may in turn depend on.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order, not rewired.

    Returns:
        (the op that uses the tensor, the op that makes it), or None.
    """
    home = {op: r for r, ops in enumerate(replicas) for op in ops}
    tainted: dict[tf.Operation, tuple[tf.Operation, tf.Operation]] = {}
    waiting = {op for ops in replicas for op in _after_communication(ops)}
    for r, ops in enumerate(replicas[1:], 1):
        for op in ops:
            for tensor in op.inputs:
                source = tensor.op
                link = tainted.get(source)
                if home.get(source, r) != r and source in waiting:
                    link = (op, source)
                if link is not None:
                    if placeholder.read(op) is not None:
                        return link
                    tainted[op] = link
    return None


def _after_communication(ops: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Returns the ops that depend on a result of communication."""
    found: set[tf.Operation] = set()
    for op in ops:
        if placeholder.read(op) is not None or any(t.op in found for t in op.inputs):
            found.add(op)
    return found
