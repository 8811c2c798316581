# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: rows of several replicas, added up by their indices."""

from __future__ import annotations

import tensorflow as tf

from replicator import errors
from replicator.graph.ir.placeholder import OperandPolicy
from replicator.graph.passes import rows
from replicator.primitives import all_gather, arithmetic, base, unknown_shapes

_FIX = "give each row its index: tf.IndexedSlices(values, indices, dense_shape)."


def reduce(
    slices: tf.IndexedSlices, op: str, group: tuple[int, ...], policy: OperandPolicy
) -> tf.IndexedSlices:
    """Gathers the rows of all replicas, and adds up equal ones.

    Args:
        slices: This replica's rows.
        op: "sum" or "mean" over the replicas.
        group: The replicas that take part.
        policy: Of which variable the rows are, and which replica needs them.
    """
    values, indices = all_gather.gather_dense(
        _paired(slices),
        axis=0,
        group=group,
        policies=[policy, policy],
    )
    gathered = tf.IndexedSlices(values, indices, slices.dense_shape)
    return add_up(gathered, len(group) if op == "mean" else 1)


def _paired(slices: tf.IndexedSlices) -> list[tf.Tensor]:
    """Returns values and indices, or those that wait until there are as many of each.

    More rows on one replica and more indices on another would become rows of others.

    Raises:
        ArgumentError: There are not, or the indices are no vector.
    """
    values, indices = slices.values, slices.indices
    vector = indices.shape.rank in (1, None) and values.shape.rank != 0
    if not vector or not values.shape[:1].is_compatible_with(indices.shape):
        raise base.bad_argument(
            "all_reduce",
            f"was given IndexedSlices of values {errors.shown(values)} and indices "
            f"{errors.shown(indices)}",
            _FIX,
        )
    if rows.as_many(values, indices):
        return [values, indices]
    return unknown_shapes.check_own(
        "all_reduce",
        [values, indices],
        lambda seen: unknown_shapes.equal([seen[0][:1], seen[1]]),
        "the numbers of values and of indices of IndexedSlices differ",
        "shapes of both",
        _FIX,
    )


def add_up(slices: tf.IndexedSlices, count: int = 1) -> tf.IndexedSlices:
    """Adds up rows of one index, in their order, and divides the sums.

    An optimizer would square each of them by itself (Keras' Adam does), and TensorFlow
    would add them up in the order in which its threads come to them.

    Args:
        slices: Rows, of several replicas one behind the other.
        count: What the sums are divided by.

    Returns:
        Each index once, where it was first.
    """
    indices, places = tf.unique(slices.indices)
    values, dtype = slices.values, slices.values.dtype
    if dtype in base.HALF:
        values = tf.cast(values, tf.float32)
    # On CPUs each thread goes through all rows in order, and adds up some of the sums.
    sums = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
    if count > 1:
        sums = arithmetic.divide(sums, count)
    return tf.IndexedSlices(tf.cast(sums, dtype), indices, slices.dense_shape)
