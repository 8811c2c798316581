"""all_gather: every replica receives the tensors of all replicas.

Meaning: the replicas' tensors stacked along a new leading axis, or set behind one
another along an existing one, where their sizes may differ. Dual: each replica's slice
of the summed gradients, a reduce_scatter. Lowering: one device (the hub) joins the
tensors, every device reads the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.graph import cost
from replicator.graph.placeholder import Call, Placeholder, Value
from replicator.graph.rewrite import Matched
from replicator.primitives import base, reduce_scatter


def all_gather(value: Any, axis: int | None = None) -> Any:
    """Gives every replica the tensors of all replicas.

    Args:
        value: A nest of tensors of any dtype. Alike on all replicas in dtype and shape,
            but for the size along `axis`, which may differ (zero included).
        axis: None for a new leading axis; else the axis to join along, counted from the
            end if negative.

    Returns:
        A nest like `value`. For a leaf of shape [...]: [num_replicas, ...] without an
        axis; else [..., sum of the replicas' sizes, ...], a size that is statically
        unknown, since replicas may differ. On this replica's device.

    Raises:
        ArgumentError: `axis` does not exist, or a leaf is no dense tensor.
    """
    context.require("all_gather")
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise base.bad_argument(
            "all_gather", f"was given axis={axis!r}", "axis is a Python int or None."
        )
    leaves = base.flatten(value, "all_gather")
    if any(isinstance(leaf, tf.IndexedSlices) for leaf in leaves):
        raise base.bad_argument(
            "all_gather",
            "cannot join IndexedSlices",
            "gather its values and indices with axis=0, or all_reduce it.",
        )
    if not leaves:
        return value
    return tf.nest.pack_sequence_as(value, gather_dense(leaves, axis))


def gather_dense(
    tensors: Sequence[tf.Tensor], axis: int | None, of: Call | None = None
) -> list[tf.Tensor]:
    """Puts one all_gather call for several tensors into the graph.

    Args:
        tensors: At least one dense tensor.
        axis: As for `all_gather`.
        of: Inside a gradient: the call that is differentiated.

    Returns:
        The gathered tensors.
    """
    if axis is None:
        num_replicas = context.require("all_gather").num_replicas
        results = [_stacked(Value.of(t), num_replicas) for t in tensors]
        agreed = None
    else:
        results = agreed = [_joined(t, axis) for t in tensors]
    return base.communicate(
        "all_gather", {"axis": axis}, tensors, results, gradient, agreed, of
    )


def _stacked(value: Value, num_replicas: int) -> Value:
    if value.shape is None:
        return value
    return Value(value.dtype, (num_replicas, *value.shape))


def _joined(leaf: tf.Tensor, axis: int) -> Value:
    """Returns dtype and shape of a leaf, its size along `axis` left open."""
    value = Value.of(leaf)
    if value.shape is None:
        return value
    rank = len(value.shape)
    if not -rank <= axis < rank:
        raise base.bad_argument(
            "all_gather",
            f"was given axis={axis} for {value}",
            f"axis lies between {-rank} and {rank - 1}, or is None for a new axis."
            if rank
            else "a scalar has no axis; use axis=None.",
        )
    return Value(value.dtype, base.without(value.shape, axis % rank))


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Gives each replica its slice of the summed gradients."""
    flowing = [k for k, d in enumerate(upstream) if base.is_differentiable(d)]
    gradients: list[tf.Tensor | None] = [None] * len(upstream)
    if flowing:
        back = reduce_scatter.sum_slices(
            [upstream[k] for k in flowing],
            like=[placed.operands[k] for k in flowing],
            axis=placed.call.options["axis"],
            of=placed.call,
        )
        for k, d in zip(flowing, back, strict=True):
            gradients[k] = d
    return gradients


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Joins each tensor on a hub, in replica order; all devices read the result.

    Moves bytes(result) in to the hub and (replicas - 1) * bytes(result) out again.
    Joining compares the shapes when it runs.
    """
    axis = matched.options["axis"]
    results = []
    for k in range(len(matched.operands[0])):
        column = matched.column(k)
        with tf.device(matched.hubs.next(len(column) * cost.tensor_bytes(column[0]))):
            results.append(
                tf.stack(column) if axis is None else tf.concat(column, axis)
            )
    return [results for _ in matched.operands]
