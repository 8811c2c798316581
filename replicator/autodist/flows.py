# SPDX-License-Identifier: Apache-2.0
"""Which values of a graph differ between replicas, each with a part of the examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import tables
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import kind_of

SHAPES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")


@dataclasses.dataclass(frozen=True)
class Flow:
    """What of a graph depends on the examples that a replica has.

    Attributes:
        differing: The ops whose results differ.
        by_value: Those of them that do not depend on the number of examples alone.
        given: What is known of some tensors, by their ids: of the inputs of a function.
        control: The conditionals and loops that are ops of the graph itself.
    """

    differing: Set[tf.Operation]
    by_value: Set[tf.Operation]
    given: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    control: switching.Flow = switching.NONE


def upstream(
    tensors: Iterable[tf.Tensor],
    stop: Callable[[tf.Operation], bool],
    inputs: Callable[[tf.Operation], Iterable[tf.Tensor]] | None = None,
) -> list[tf.Operation]:
    """Returns the ops on which tensors depend, each behind those that it depends on.

    Args:
        tensors: In one graph.
        stop: Says behind which ops not to look.
        inputs: Returns the inputs behind which to look; None: all of them.
    """
    seen: set[tf.Operation] = set()
    ordered: list[tf.Operation] = []
    stack = [(tensor.op, False) for tensor in tensors]
    while stack:
        op, done = stack.pop()
        if done:
            ordered.append(op)
        elif op not in seen:
            seen.add(op)
            stack.append((op, True))
            if not stop(op):
                own = op.inputs if inputs is None else inputs(op)
                stack += [(t.op, False) for t in own if t.op not in seen]
    return ordered


def needed(op: tf.Operation) -> Iterator[tf.Operation]:
    """Yields an op and all that has to run before it, for its results or its effect."""
    seen, stack = {op}, [op]
    while stack:
        one = stack.pop()
        yield one
        sources = {*(tensor.op for tensor in one.inputs), *one.control_inputs} - seen
        seen |= sources
        stack += sources


def flow(
    ops: Iterable[tf.Operation],
    source: Callable[[tf.Operation], str],
    same: Callable[[tf.Operation], bool],
    **facts: Any,
) -> Flow:
    """Returns what differs of some ops.

    Args:
        ops: Each behind those that it depends on.
        source: Says of an op that gives each replica its own "value", of one that gives
            it the number of its examples "shape", and of all others "".
        same: Says of which ops the results are the same, whatever they depend on.
        **facts: Further ones of the Flow.
    """
    differing: set[tf.Operation] = set()
    by_value: set[tf.Operation] = set()
    for op in ops:
        own = source(op)
        if same(op):
            continue
        inputs = [tensor.op for tensor in op.inputs]
        if own or any(one in differing for one in inputs):
            differing.add(op)
        if own == "value" or (
            op.type not in SHAPES and any(one in by_value for one in inputs)
        ):
            by_value.add(op)
    return Flow(differing, by_value, **facts)


def asks_python(tensor: tf.Tensor) -> bool:
    """Whether Python computes a tensor, or something on which it depends."""
    return any(map(_asks_python, upstream([tensor], lambda op: False)))


def _asks_python(op: tf.Operation) -> bool:
    if op.type in tables.BELIEVED:
        return True
    return kind_of(op).calls and any(
        _asks_python(inner)
        for _, body in _tf.called_graphs(op)
        for inner in body.get_operations()
    )


def draws(op: tf.Operation) -> bool:
    """Whether an op draws random numbers, or asks Python, also in a function."""
    kind = kind_of(op)
    if kind.seeded and kind.stateful or op.type in tables.BELIEVED:
        return True
    if not kind.calls:
        return False
    return any(
        draws(inner)
        for _, body in _tf.called_graphs(op)
        for inner in body.get_operations()
    )
