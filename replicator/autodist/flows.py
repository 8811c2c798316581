# SPDX-License-Identifier: Apache-2.0
"""Finds the ops whose values differ between replicas that hold different examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import tables
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import kind_of

SHAPES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")


@dataclasses.dataclass(frozen=True)
class Flow:
    """The ops of a graph that depend on a replica's examples.

    Attributes:
        differing: The ops whose results differ.
        by_value: Those that depend on more than the number of examples.
        given: Known Values of some tensors, by tensor id: a function's inputs.
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
    """Returns the ops that tensors depend on, in topological order.

    Args:
        tensors: Tensors of one graph.
        stop: Whether the inputs of an op are left out.
        inputs: Returns the inputs of an op to follow; None: all of them.
    """
    seen: set[tf.Operation] = set()
    ordered: list[tf.Operation] = []
    stack = [(tensor.op, False) for tensor in tensors]
    while stack:
        op, is_expanded = stack.pop()
        if is_expanded:
            ordered.append(op)
        elif op not in seen:
            seen.add(op)
            stack.append((op, True))
            if not stop(op):
                followed = op.inputs if inputs is None else inputs(op)
                stack += [(t.op, False) for t in followed if t.op not in seen]
    return ordered


def needed(
    op: tf.Operation, fed: Collection[tf.Operation] = ()
) -> Iterator[tf.Operation]:
    """Yields an op and all ops that must run before it, for results or effects.

    Args:
        op: The op.
        fed: Ops that need not run, since their results are fed.
    """
    seen, stack = {op, *fed}, [] if op in fed else [op]
    while stack:
        current = stack.pop()
        yield current
        sources = {
            *(tensor.op for tensor in current.inputs),
            *current.control_inputs,
        } - seen
        seen |= sources
        stack += sources


def flow(
    ops: Iterable[tf.Operation],
    source: Callable[[tf.Operation], str],
    same: Callable[[tf.Operation], bool],
    **facts: Any,
) -> Flow:
    """Returns the Flow of some ops.

    Args:
        ops: The ops, in topological order.
        source: Returns "value" for an op that gives each replica its own value, "shape"
            for one that gives the number of its examples, and "" for all others.
        same: Whether an op's results are the same on all replicas, whatever it depends
            on.
        **facts: Further fields of the Flow.
    """
    differing: set[tf.Operation] = set()
    by_value: set[tf.Operation] = set()
    for op in ops:
        source_kind = source(op)
        if same(op):
            continue
        inputs = [tensor.op for tensor in op.inputs]
        if source_kind or any(source_op in differing for source_op in inputs):
            differing.add(op)
        if source_kind == "value" or (
            op.type not in SHAPES and any(source_op in by_value for source_op in inputs)
        ):
            by_value.add(op)
    return Flow(differing, by_value, **facts)


def asks_python(tensor: tf.Tensor) -> bool:
    """Whether Python computes a tensor or anything it depends on."""
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
    """Whether an op draws random numbers or calls Python, even inside a function."""
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
