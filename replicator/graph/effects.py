"""What a step does besides computing: what it writes, and in which order.

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
        """Ops made in this block, in the default graph, write what all replicas do."""
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
    """Orders effects inside each replica only, where TensorFlow would mix the replicas.

    That is: effects that touch no resource (prints, assertions, Python calls), and
    those on a resource that several replicas write (a hash table). The components of
    variables belong to one replica each, and are left to TensorFlow.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order; the ops of the
            lowered communication may be passed as one more.
    """
    shared = _written_by_several(replicas)
    chains = []
    for ops in replicas:
        chain: list[tf.Operation] = []
        for op in ops:
            if not _tf.is_stateful(op):
                continue
            resources = {id(t) for t in op.inputs if t.dtype == tf.resource}
            if resources and not resources & shared:
                continue
            _tf.run_independently(op.graph, op)
            if chain:
                _tf.add_control_inputs(op, [chain[-1]])
            chain.append(op)
        if chain:
            chains.append(chain)
    if chains:
        # Between these two, which TensorFlow puts in order with what stands before and
        # after the step.
        first, last = _marker("begin"), _marker("end")
        for chain in chains:
            _tf.add_control_inputs(chain[0], [first])
        _tf.add_control_inputs(last, [chain[-1] for chain in chains])


def _marker(name: str) -> tf.Operation:
    """Returns an op that does nothing, but counts as an effect that touches nothing."""
    with tf.control_dependencies(None):
        return tf.raw_ops.Assert(condition=True, data=[name], name=name)


def _written_by_several(replicas: Sequence[Sequence[tf.Operation]]) -> set[int]:
    """Returns the ids of the resources that more than one replica writes."""
    users: dict[int, set[int]] = {}
    for r, ops in enumerate(replicas):
        for op in ops:
            for tensor in op.inputs:
                if tensor.dtype == tf.resource:
                    users.setdefault(id(tensor), set()).add(r)
    # Few resources are shared, so few ops are asked what they write, which is slow.
    shared = {resource for resource, who in users.items() if len(who) > 1}
    writers: dict[int, set[int]] = {}
    for r, ops in enumerate(replicas) if shared else ():
        for op in ops:
            if any(id(tensor) in shared for tensor in op.inputs):
                for resource in _tf.resources_touched(op)[1]:
                    writers.setdefault(resource, set()).add(r)
    return {resource for resource, who in writers.items() if len(who) > 1}


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


def _sources(op: tf.Operation) -> Iterator[tf.Operation]:
    """Yields the ops that `op` waits for."""
    for tensor in op.inputs:
        yield tensor.op
    yield from op.control_inputs
