# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: rows of several replicas, added up by their indices."""

from __future__ import annotations

import tensorflow as tf

from replicator.graph.ir.placeholder import OperandPolicy
from replicator.primitives import all_gather, arithmetic, base


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
        [slices.values, slices.indices],
        axis=0,
        group=group,
        policies=[policy, policy],
    )
    gathered = tf.IndexedSlices(values, indices, slices.dense_shape)
    return add_up(gathered, len(group) if op == "mean" else 1)


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
