# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter: each replica receives its slice of a reduction over all replicas.

Meaning: op(x_0, x_1, ..., x_{R-1}), element by element, is split along an axis; the
n-th replica receives the n-th slice. Dual: the gradients of all slices are gathered,
and each replica takes its share of them (reductions.py). Lowering: every device splits
its tensor, and each replica reduces its slices; a replica receives no more than it
keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.graph.ir.placeholder import Placeholder, PrimitiveFacts, Value
from replicator.graph.lowering.matched import Matched
from replicator.primitives import (
    all_gather,
    arithmetic,
    axes,
    base,
    flows,
    groups,
    partials,
    reductions,
    unknown_shapes,
    weighing,
)

FACTS = PrimitiveFacts()


def reduce_scatter(
    value: Any, op: str = "sum", axis: int = 0, group: Any = None
) -> Any:
    """Reduces over all replicas and gives each one its slice of the result.

    Example:
        >>> x = tf.constant([1, 2, 3, 4])  # on both replicas
        >>> for y in repl.run(lambda: repl.reduce_scatter(x)): print(y)
        tf.Tensor([2 4], shape=(2,), dtype=int32)
        tf.Tensor([6 8], shape=(2,), dtype=int32)

    Args:
        value: A nest of tensors, of the same dtypes and shapes on all replicas; the
            dtypes are those that `all_reduce` takes for `op`.
        op: As for `reduce`.
        axis: The axis to split, counted from the end if negative. If its size is not a
            multiple of the number of replicas, the first ones receive one row more.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.

    Returns:
        A nest like `value` of this replica's slices, on its device: the n-th replica
        of the group receives the n-th slice. For "argmin" and "argmax" each leaf is an
        `Extremum`.

    Raises:
        ArgumentError: `op` is unknown or undefined for a dtype, a mean would need
            weights, `axis` does not exist, or a leaf is not a dense tensor.
        ContextError: Called outside a step.
    """
    members = groups.members("reduce_scatter", group)
    reductions.check_op("reduce_scatter", op)
    reductions.refuse_equal_weights("reduce_scatter", op)
    axes.check("reduce_scatter", axis)
    leaves = base.flatten(value, "reduce_scatter")
    for leaf in leaves:
        _check(leaf, op, axis)
    if not leaves:
        return value
    index = members.index(context.require("reduce_scatter").replica_id)
    received = base.communicate(
        "reduce_scatter",
        {"op": op, "axis": axis},
        leaves,
        [
            axes.slice_of("reduce_scatter", whole, axis, index, len(members))
            for whole in reductions.results(op, leaves)
        ],
        group=members,
    )
    weighing.note_combined(received, op, members)
    return tf.nest.pack_sequence_as(value, reductions.as_leaves(op, received))


def _check(leaf: tf.Tensor | tf.IndexedSlices, op: str, axis: int) -> None:
    """Raises ArgumentError unless the leaf can be reduced and split."""
    if isinstance(leaf, tf.IndexedSlices):
        raise base.bad_argument(
            "reduce_scatter",
            "cannot cut up IndexedSlices",
            "convert them with tf.convert_to_tensor, or all_reduce them.",
        )
    reductions.check("reduce_scatter", leaf, op)
    axes.position("reduce_scatter", axis, Value.of(leaf))


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Gathers the gradients of all slices; each replica takes its share."""
    call, operands = placed.call, placed.operands
    op, axis = call.options["op"], call.options["axis"]
    flowing = flows.places(operands)
    if not flowing:
        return [None] * len(operands)
    own_operands = [operands[k] for k in flowing]
    slice_gradients = [upstream[k] for k in flowing]
    totals = all_gather.gather_dense(slice_gradients, axis, of=call)
    results: list[tf.Tensor] = []
    if op not in ("sum", "mean"):
        slices = reductions.of_leaves(placed.results, flowing, len(operands))
        wholes = [tf.stop_gradient(tensor) for tensor in slices]
        results = all_gather.gather_dense(wholes, axis, of=call)
    gradients = reductions.share(op, own_operands, results, totals, call)
    gradients = [
        arithmetic.ensure_shape(d, operands[k].shape)
        for k, d in zip(flowing, gradients, strict=True)
    ]
    return flows.spread(gradients, flowing, len(operands))


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Splits on the sender and reduces on the receiver, in replica order.

    Moves (replicas - 1) / replicas * bytes(value) per replica. Between hosts, a replica
    receives one slice from each, the reduction of that host's replicas' slices.
    """
    options, replicas = matched.options, range(len(matched.operands))
    matched = unknown_shapes.check_alike(matched, split=options["axis"])
    # results[n][k] is what participant n receives for its k-th tensor: value, owner.
    results: list[list[list[tf.Tensor]]] = [[] for _ in replicas]
    count = len(matched.operands[0]) // (2 if options.get("sized") else 1)
    for k in range(count):
        sizes = tf.stack(matched.column(count + k)) if options.get("sized") else None
        pieces = []
        for value, device in zip(matched.column(k), matched.devices, strict=True):
            with tf.device(device):
                pieces.append(axes.cut(value, options["axis"], len(replicas), sizes))
        for n in replicas:
            column = [slices[n] for slices in pieces]
            results[n].append(partials.combine(matched, column, matched.devices[n]))
    return [
        [tensor for part in zip(*row, strict=True) for tensor in part]
        for row in results
    ]
