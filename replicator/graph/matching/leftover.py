# SPDX-License-Identifier: Apache-2.0
"""Checks that no placeholder is left in what a step runs.

Runs after all passes and changes nothing. A leftover placeholder is a bug of ours: some
pass did not see it. At run time it would fail with an error that tells the user
nothing, so this check reports it while the step is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import functions
from replicator._tf import ops as tf_ops
from replicator.graph.ir import placeholder, walk
from replicator.graph.ir.kinds import has_effect, kind_of
from replicator.graph.ir.placeholder import Call


def check(ops: Sequence[tf.Operation], returned: Any) -> None:
    """Raises InternalError if a step depends on a placeholder, at any depth.

    Args:
        ops: The step's top-level ops.
        returned: What the step returns, a nest of tensors and ops.
    """
    roots = {op for op in ops if has_effect(op) and not tf_ops.is_abandoned(op)}
    for leaf in tf.nest.flatten(returned, expand_composites=True):
        if isinstance(leaf, tf.Operation):
            roots.add(leaf)
        elif tf.is_symbolic_tensor(leaf):
            roots.add(leaf.op)
    leftover = _left_in(ops, roots, {})
    if leftover:
        raise errors.InternalError(
            "communication is left in the step that was not matched with that of the "
            "other replicas, and would fail when the step runs. This is a bug in "
            "Replicator, not in your code.",
            [call.site() for call in leftover[:3]],
            "please report it, with step_fn; until it is fixed, it may help to "
            "communicate outside of this conditional, loop or function.",
        )


def _left_in(
    ops: Iterable[tf.Operation],
    roots: set[tf.Operation],
    cache: dict[int, list[Call]],
) -> list[Call]:
    """Returns the calls that a graph depends on, including those in its functions.

    Args:
        ops: The ops of the graph.
        roots: The ops needed for their own sake.
        cache: The results for functions visited so far, by the id of their graph.
    """
    candidates = []
    for op in ops:
        if op.type != placeholder.TYPE and not kind_of(op).calls:
            continue
        if op not in roots and not _has_consumers(op):  # true of all replaced ops
            continue
        call = placeholder.read(op)
        calls = _left_inside(op, cache) if call is None else [call]
        if calls:
            candidates.append((op, calls))
    needed = walk.upstream(roots) if candidates else set()
    return [call for op, calls in candidates if op in needed for call in calls]


def _left_inside(op: tf.Operation, cache: dict[int, list[Call]]) -> list[Call]:
    """Returns the calls needed in the functions that an op calls."""
    inside = []
    for _, body in functions.called_graphs(op):
        if id(body) not in cache:
            roots = {*(tensor.op for tensor in body.outputs), *body.control_outputs}
            cache[id(body)] = _left_in(body.get_operations(), roots, cache)
        inside += cache[id(body)]
    return inside


def _has_consumers(op: tf.Operation) -> bool:
    return any(output.consumers() for output in op.outputs) or bool(
        tf_ops.control_outputs(op)
    )
