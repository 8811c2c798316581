# SPDX-License-Identifier: Apache-2.0
"""reduce: one reduction over all replicas, with the result on the root.

Meaning: the root receives op(x_0, x_1, ..., x_{R-1}), element by element; the others
receive nothing. Dual: the gradient of the result is broadcast from the root, and each
replica takes its share of it (reductions.py). Lowering: the root's device reduces in
replica order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.graph.ir.placeholder import Placeholder, PrimitiveFacts
from replicator.graph.lowering.matched import Matched
from replicator.primitives import (
    base,
    broadcast,
    flows,
    gather,
    groups,
    partials,
    reductions,
    rooted,
    sparse,
    unknown_shapes,
    weighing,
)

FACTS = PrimitiveFacts()


def reduce(value: Any, root: int = 0, op: str = "sum", group: Any = None) -> Any:
    """Reduces over all replicas and gives the root the result.

    The other replicas' losses do not depend on what the root computes from the result.
    For gradients to come back, differentiate `Replicator.linked(loss)` there.

    Example:
        >>> def step_fn():
        ...     total = repl.reduce(repl.replica_id + 1.0, root=1)
        ...     return 0.0 if total is None else total  # None on replica 0
        >>> for x in repl.run(step_fn): print(x)
        tf.Tensor(0.0, shape=(), dtype=float32)
        tf.Tensor(3.0, shape=(), dtype=float32)

    Args:
        value: A nest of tensors, as for `all_reduce`.
        root: The replica that receives the result, a member of the group.
        op: As for `all_reduce`; "mean" only where all replicas have the same number of
            examples, since there are no weights.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.

    Returns:
        On the root a nest like `value`, as `all_reduce` would return; None on the
        others.

    Raises:
        ArgumentError: `root` is not a replica, `op` is unknown or undefined for a
            dtype, or a mean would need weights.
        ContextError: Called outside a step.
    """
    members = groups.members("reduce", group)
    base.check_root("reduce", root, members)
    reductions.check_op("reduce", op)
    reductions.refuse_equal_weights("reduce", op)
    leaves = base.flatten(value, "reduce")
    for leaf in leaves:
        reductions.check("reduce", leaf, op)
    dense = [leaf for leaf in leaves if not isinstance(leaf, tf.IndexedSlices)]
    reduced = _reduce_dense(dense, root, op, members) if dense else []
    received = iter(reductions.as_leaves(op, reduced))
    results = []
    for leaf in leaves:
        if isinstance(leaf, tf.IndexedSlices):
            results.append(_reduce_sparse(leaf, root, op, members))
        else:
            results.append(next(received, None))
    if not rooted.is_root(root):
        return None
    weighing.note_combined(results, op, members)
    return tf.nest.pack_sequence_as(value, results)


def _reduce_dense(
    tensors: Sequence[tf.Tensor], root: int, op: str, group: tuple[int, ...]
) -> list[tf.Tensor]:
    """Puts one reduce call into the graph; only the root receives results."""
    at_root = rooted.is_root(root)
    return base.communicate(
        "reduce",
        {"root": root, "op": op},
        tensors,
        reductions.results(op, tensors) if at_root else [],
        group=group,
        receipt=not at_root,
    )


def _reduce_sparse(
    slices: tf.IndexedSlices, root: int, op: str, group: tuple[int, ...]
) -> tf.IndexedSlices | None:
    """Gathers the rows of all replicas on the root and sums rows of the same index."""
    rows = gather.gather_dense(sparse.paired("reduce", slices), root, 0, group=group)
    if not rows:
        return None
    gathered = tf.IndexedSlices(*rows, slices.dense_shape)
    return sparse.add_up(gathered, len(group) if op == "mean" else 1)


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Broadcasts the gradients of the results; each replica takes its share of them."""
    call, operands = placed.call, placed.operands
    root, op = call.options["root"], call.options["op"]
    flowing = flows.places(operands)
    if not flowing:
        return [None] * len(operands)
    own_operands = [operands[k] for k in flowing]
    result_gradients, witnesses = [], own_operands
    if rooted.is_root(root):
        result_gradients = [upstream[k] for k in flowing]
        witnesses = [placed.results[k] for k in flowing]
    totals = broadcast.send(
        result_gradients, rooted.values(own_operands), witnesses, root, of=call
    )
    results: list[tf.Tensor] = []
    if op not in ("sum", "mean"):
        values = reductions.results(op, own_operands)
        received = reductions.of_leaves(placed.results, flowing, len(operands))
        results = broadcast.send(received, values, [], root, of=call)
    gradients = reductions.share(op, own_operands, results, totals, call)
    return flows.spread(gradients, flowing, len(operands))


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Reduces on the root's device. Moves (replicas - 1) * bytes(value) to it.

    Each other host reduces its replicas' tensors first and sends bytes(value).
    """
    matched = unknown_shapes.check_alike(matched)
    root = matched.group.index(matched.options["root"])
    parts = [
        partials.combine(matched, matched.column(k), matched.devices[root])
        for k in range(len(matched.operands[root]))
    ]
    received = [tensor for part in zip(*parts, strict=True) for tensor in part]
    return [received if n == root else [] for n in range(len(matched.operands))]
