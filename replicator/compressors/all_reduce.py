# SPDX-License-Identifier: Apache-2.0
"""The public all_reduce, which takes an optional compressor.

Its gradient is that of the exact all_reduce and is not compressed. Rounding has a
derivative of zero almost everywhere, which would stop training, so it counts as the
identity (the straight-through estimator, Bengio et al. 2013, arXiv:1308.3432); and a
residual that is fed back into the next step has no dual in this one. To compress
gradients, pass a compressor to the wrapped optimizer.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.compressors import reducing, specs
from replicator.compressors.kept import Kept, place_of
from replicator.compressors.memory import StateStore
from replicator.primitives import (
    algorithms,
    base,
    by_hand,
    groups,
    reductions,
    weighing,
)
from replicator.primitives import all_reduce as exact


def all_reduce(
    value: Any,
    op: str = "sum",
    weight: Any = "auto",
    group: Any = None,
    algorithm: str | None = None,
    compressor: Any = None,
) -> Any:
    """Reduces over all replicas and gives every replica the result.

    Example:
        >>> for x in repl.run(lambda: repl.all_reduce(repl.replica_id + 1.0)): print(x)
        tf.Tensor(3.0, shape=(), dtype=float32)
        tf.Tensor(3.0, shape=(), dtype=float32)

    Args:
        value: A nest of tensors, of the same dtypes and shapes on all replicas.
            IndexedSlices, allowed for "sum" and "mean", stay sparse: each row that any
            replica has appears once. 16-bit floats are summed and multiplied in
            float32.
        op: "sum" or "prod" for numbers; "mean" for floating and complex numbers; "min",
            "max", "argmin" or "argmax" for floating numbers and integers;
            "bitwise_and", "bitwise_or" or "bitwise_xor" for integers and booleans;
            "logical_and" or "logical_or" for booleans, with the synonyms "min" and
            "max".
        weight: For "mean": a scalar per replica, e.g. its number of examples. The
            result is sum(weight_r * x_r) / sum(weight_r). A replica of weight 0 does
            not contribute, whatever its value (NaN included); if all weights are 0, the
            result is 0. "auto": `Replicator.weight`, so that the mean is that over all
            examples, where replicas may have different numbers of them; gradients that
            passed through communication are then weighted by the replica whose loss
            they are of, as by a wrapped optimizer. None: all replicas count the same.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.
        algorithm: "hub", "shuffled", "tree", "ring" or "nccl", see `Replicator`. None:
            that of the Replicator, or else the cheapest, which may be to send the
            factors of a matrix product instead of the product. Gradients use the same
            one. IndexedSlices, whose rows are gathered, use none.
        compressor: Shrinks floating tensors while they travel, for "sum" and "mean": a
            Compressor, or its text, see `replicator.compressors`. Integers and complex
            numbers are sent unchanged; rows of IndexedSlices are at most cast. Its
            state between steps belongs to this call; a `compressors.Kept` holds it for
            checkpoints. The gradient is that of the exact sum and is not compressed.
            None: everything is sent unchanged.

    Returns:
        A nest like `value`, the same bits on every replica, on this replica's device.
        For "argmin" and "argmax" each leaf is an `Extremum(value, owner)`; the gradient
        of `value` goes to the owner alone.

    Raises:
        ArgumentError: `op` is unknown or undefined for a dtype; or the algorithm or the
            compressor is unknown or does not support it.
        ContextError: Called outside a step.
    """
    weight = exact.weight_of(op, weight)
    holder = compressor if isinstance(compressor, Kept) else None
    active = holder.compressor if holder else specs.compressor("all_reduce", compressor)
    if active is None:
        return exact.all_reduce(value, op, weight, group, algorithm)
    members = groups.members("all_reduce", group)
    reductions.check_op("all_reduce", op)
    algorithms.check("all_reduce", algorithm)
    leaves = base.flatten(value, "all_reduce")
    for leaf in leaves:
        reductions.check("all_reduce", leaf, op)
    if op not in ("sum", "mean"):
        raise base.bad_argument(
            "all_reduce",
            f"was given op={errors.repr_of(op)} with a compressor",
            'pass op="sum" or op="mean": compressors only add up.',
        )
    if weight is not None and op != "mean":
        raise base.bad_argument(
            "all_reduce",
            f"was given a weight with op={errors.repr_of(op)}",
            'pass weights only with op="mean".',
        )
    if not leaves:
        return value
    complete = weight is None
    if weight is not None:
        weight = exact.as_weight("all_reduce", weight)
        leaves, complete = by_hand.of_mean(leaves, weight, members)
    if holder is not None:
        place = place_of(holder)
    else:
        place = StateStore(tf.Module(name="all_reduce"), "all_reduce")
    call = reducing.ReduceArguments(
        op=op,
        members=members,
        weight=weight,
        place=place,
        algorithm=algorithm,
        differentiable=True,
    )
    reduced = reducing.reduce(call, leaves, [active] * len(leaves))
    if complete:
        weighing.note_combined(reduced, op, members)
    return tf.nest.pack_sequence_as(value, reduced)
