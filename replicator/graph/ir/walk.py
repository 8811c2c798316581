# SPDX-License-Identifier: Apache-2.0
"""Walks from ops to those on which they depend, and into functions that they call."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

from replicator._tf import functions
from replicator.graph.ir.kinds import kind_of

_Op = TypeVar("_Op", bound=Hashable)  # an op, or what stands for one


def waits_for(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops for which an op waits."""
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def computed_from(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops whose results an op takes."""
    return [tensor.op for tensor in op.inputs]


def upstream(
    ops: Iterable[_Op],
    sources: Callable[[Any], Iterable[_Op]] = waits_for,
    among: Container[_Op] | None = None,
) -> set[_Op]:
    """Returns ops and all on which they depend.

    Args:
        ops: The ops.
        sources: Returns the ops on which an op itself depends.
        among: The ops to stay among, or None for all.
    """
    stack = [*ops]
    reached: set[_Op] = set()
    while stack:
        op = stack.pop()
        if op not in reached and (among is None or op in among):
            reached.add(op)
            stack += sources(op)
    return reached


def in_order(
    ops: Iterable[_Op],
    sources: Callable[[Any], Iterable[_Op]] = waits_for,
    among: Container[_Op] | None = None,
) -> list[_Op]:
    """Returns ops and all on which they depend, each after these.

    Of ops in a circle, as a TensorFlow 1 loop is, some come before what they depend on.

    Args:
        ops: The ops; the last come first, if they do not depend on the others.
        sources: Returns the ops on which an op itself depends.
        among: The ops to stay among, or None for all.
    """
    ordered: list[_Op] = []
    reached: set[_Op] = set()
    stack = [(op, False) for op in ops]
    while stack:
        op, is_done = stack.pop()
        if is_done:
            ordered.append(op)
        elif op not in reached and (among is None or op in among):
            reached.add(op)
            stack.append((op, True))
            stack += [(one, False) for one in sources(op) if one not in reached]
    return ordered


def at_any_depth(
    ops: Iterable[tf.Operation], seen: set[tf.Graph] | None = None
) -> Iterator[tf.Operation]:
    """Yields ops, each before those of the functions that it calls.

    Args:
        ops: The ops.
        seen: The functions to leave out, to which others are added: each is entered
            once.
    """
    seen = set() if seen is None else seen
    for op in ops:
        yield op
        for _, body in functions.called_graphs(op) if kind_of(op).calls else ():
            if body not in seen:
                seen.add(body)
                yield from at_any_depth(body.get_operations(), seen)
