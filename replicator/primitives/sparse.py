# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients: gathers all replicas' rows and sums rows of the same index."""

from __future__ import annotations

import tensorflow as tf

from replicator import context, errors
from replicator.graph.ir.placeholder import NO_POLICY, OperandPolicy
from replicator.graph.passes import rows
from replicator.primitives import (
    all_gather,
    arithmetic,
    base,
    rooted,
    unknown_shapes,
)

_FIX = "give each row its index: tf.IndexedSlices(values, indices, dense_shape)."


def reduce(
    slices: tf.IndexedSlices, op: str, group: tuple[int, ...], policy: OperandPolicy
) -> tf.IndexedSlices:
    """Gathers the rows of all replicas and sums rows of the same index.

    Args:
        slices: This replica's rows.
        op: "sum" or "mean" over the replicas.
        group: The participating replicas.
        policy: The variable of the rows, and the replica that needs them.
    """
    values, indices = all_gather.gather_dense(
        paired("all_reduce", slices),
        axis=0,
        group=group,
        policies=[policy, policy],
    )
    gathered = tf.IndexedSlices(values, indices, slices.dense_shape)
    return add_up(gathered, len(group) if op == "mean" else 1, group, policy)


def paired(what: str, slices: tf.IndexedSlices) -> list[tf.Tensor]:
    """Returns values and indices, checked to be equally many.

    Surplus rows of one replica would otherwise be paired with another's indices.

    Args:
        what: The primitive, for messages.
        slices: The rows of the replica being built.

    Raises:
        ArgumentError: Their numbers differ, or the indices are not a vector.
    """
    values, indices = slices.values, slices.indices
    vector = indices.shape.rank in (1, None) and values.shape.rank != 0
    if not vector or not values.shape[:1].is_compatible_with(indices.shape):
        raise base.bad_argument(
            what,
            f"was given IndexedSlices of values {errors.repr_of(values)} and indices "
            f"{errors.repr_of(indices)}",
            _FIX,
        )
    if rows.as_many(values, indices):
        return [values, indices]
    return unknown_shapes.check_local(
        what,
        [values, indices],
        lambda vectors: unknown_shapes.equal([vectors[0][:1], vectors[1]]),
        "the numbers of values and of indices of IndexedSlices differ",
        "shapes of both",
        _FIX,
    )


def add_up(
    slices: tf.IndexedSlices,
    count: int = 1,
    group: tuple[int, ...] = (),
    policy: OperandPolicy = NO_POLICY,
) -> tf.IndexedSlices:
    """Sums the rows of each index, in their order, and divides the sums.

    Without the sums, an optimizer might square each row by itself (Keras' Adam does),
    and TensorFlow would add them up in the order in which its threads reach them.

    Args:
        slices: The rows of all replicas, concatenated.
        count: The divisor.
        group: The replicas that sum these rows and need the same bits, if any. Even
            where one owns the variable, others may compute a norm.
        policy: The variable of the rows, and the replica that owns it.

    Returns:
        Each index once, in the order of first occurrence.
    """
    indices, positions = tf.unique(slices.indices)
    values, dtype = slices.values, slices.values.dtype
    if dtype in base.HALF:
        values = tf.cast(values, tf.float32)
    # On CPUs each thread computes some of the sums and scans all rows in order.
    sums = tf.math.unsorted_segment_sum(values, positions, tf.size(indices))
    if len(group) > 1 and in_any_order(group):
        root = policy.owner if policy.owner in group else group[0]
        sums = rooted.in_place(sums, root, group, policy)
    if count > 1:
        sums = arithmetic.divide(sums, count)
    return tf.IndexedSlices(tf.cast(sums, dtype), indices, slices.dense_shape)


def in_any_order(group: tuple[int, ...]) -> bool:
    """Whether devices of these replicas may add up rows in another order each time.

    GPUs do, by atomic additions: sums of the same rows differ in their last bits, and
    mirrored variables would drift apart.
    """
    devices = context.require("all_reduce").build.world.all_devices
    return any(
        tf.DeviceSpec.from_string(devices[r]).device_type != "CPU" for r in group
    )
