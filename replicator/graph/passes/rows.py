# SPDX-License-Identifier: Apache-2.0
"""Rows of a tensor in parts: which part has which, and all of them joined again.

Pure functions of tensors and sizes, for variables and for passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import tensorflow as tf

from replicator.graph.ir import shapes

Reader = Callable[[tf.Tensor], tf.Tensor]


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Returns where each part begins."""
    return [sum(sizes[:k]) for k in range(len(sizes))]


def vector(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns indices as a vector, and its shape, by the ops that TensorFlow takes.

    It does so where it differentiates a lookup. What is computed alike of the same is
    seen to be the same, and computed once.

    Args:
        indices: Integers of any shape.
    """
    size = tf.expand_dims(tf.size(indices), 0)
    return tf.reshape(indices, size), size


def owners_of(flat: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Returns in which part each row of the whole is, an int32 [rows].

    Rows that do not exist are the first or the last part's, which refuses them.

    Args:
        flat: Rows of the whole, integers [rows].
        sizes: Of the parts, along axis 0.
    """
    owners = tf.zeros_like(flat, tf.int32)
    for bound in offsets_of(sizes)[1:]:
        owners += tf.cast(flat >= tf.constant(bound, flat.dtype), tf.int32)
    return owners


def local_rows(
    flat: tf.Tensor, owners: tf.Tensor, sizes: Sequence[int]
) -> list[tf.Tensor]:
    """Returns for each part those rows that are its, by its own numbers.

    Args:
        flat: Rows of the whole, integers [rows].
        owners: What `owners_of` returned.
        sizes: Of the parts, along axis 0.
    """
    split = tf.dynamic_partition(flat, owners, len(sizes))
    return [
        own - tf.constant(offset, flat.dtype)
        for own, offset in zip(split, offsets_of(sizes), strict=True)
    ]


def places_of(owners: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Returns for each part the positions in a list of rows that are of its rows.

    Args:
        owners: What `owners_of` returned.
        count: How many parts there are.
    """
    return list(tf.dynamic_partition(tf.range(tf.size(owners)), owners, count))


def split(
    values: tf.Tensor, flat: tf.Tensor, owners: tf.Tensor, count: int
) -> list[tf.Tensor]:
    """Returns of some rows those of each part.

    On CPUs, tf.dynamic_partition takes as long for rows of one number as for rows of
    64, several times as long as tf.gather. But it fails, where tf.gather is silent, if
    there are more rows than indices.

    Args:
        values: The rows [rows, ...].
        flat: Which rows of the whole they are, integers [rows].
        owners: What `owners_of` returned of these.
        count: How many parts there are.
    """
    if values.shape[1:].num_elements() != 1 or not as_many(values, flat):
        return list(tf.dynamic_partition(values, owners, count))
    return [tf.gather(values, places) for places in places_of(owners, count)]


def as_many(values: tf.Tensor, indices: tf.Tensor) -> bool:
    """Whether there is known to be a row for each index, however many that are.

    Args:
        values: Rows, [rows, ...].
        indices: Of these rows, a vector.
    """
    own, other = shapes.static(values), shapes.static(indices)
    if own and other and None not in (own[0], other[0]):
        return own[0] == other[0]
    if tf.executing_eagerly():
        return False
    count = _count(values)
    return count is not None and count == _count(indices)


def _count(tensor: tf.Tensor) -> Hashable:
    """Returns what says how many rows a tensor has, None if nothing known does.

    TensorFlow makes the gradient of what is looked up of rows and indices that it
    reshapes to one count; rows and indices of a part are of the same positions.
    """
    while True:
        op = tensor.op
        if op.type in ("Identity", "Cast") or op.type == "Sub" and _is_scalar(op, 1):
            tensor = op.inputs[0]
        elif op.type == "GatherV2" and gathers_rows(op) and _is_vector(op, 1):
            tensor = op.inputs[1]
        elif op.type == "DynamicPartition" and _is_vector(op, 1):
            return id(op.inputs[1]), tensor.value_index
        elif op.type == "Reshape":
            shape = op.inputs[1]
            size = shape.op.inputs[0] if shape.op.type == "ConcatV2" else shape
            known = tf.get_static_value(size)
            return None if known is not None and (known < 0).any() else id(size)
        else:
            return None


def _is_scalar(op: tf.Operation, k: int) -> bool:
    return bool(op.inputs[k].shape.rank == 0)


def _is_vector(op: tf.Operation, k: int) -> bool:
    return bool(op.inputs[k].shape.rank == 1)


def gathers_rows(op: tf.Operation) -> bool:
    """Whether a GatherV2 gathers along the first axis, without batches."""
    return not op.get_attr("batch_dims") and tf.get_static_value(op.inputs[2]) == 0


def gathered(
    readers: Sequence[Reader], indices: tf.Tensor, axis: int, sizes: Sequence[int]
) -> tf.Tensor:
    """Returns rows of the whole, each read of the part that has it.

    Args:
        readers: `readers[k]` returns rows of part k.
        indices: Rows of the whole, integers of any shape.
        axis: Along which it is in parts.
        sizes: Of the parts, along that axis.

    Returns:
        A tensor of shape [*indices.shape, ...].
    """
    if axis:
        columns = [reader(indices) for reader in readers]
        # Each has the axes of the indices in place of the first one.
        return tf.concat(columns, axis - 1 + tf.rank(indices))
    flat, _ = vector(indices)
    owners = owners_of(flat, sizes)
    own = local_rows(flat, owners, sizes)
    value = tf.dynamic_stitch(
        places_of(owners, len(sizes)),
        [reader(local) for reader, local in zip(readers, own, strict=True)],
    )
    if indices.shape.rank == 1:
        return value
    return tf.reshape(value, tf.concat([tf.shape(indices), tf.shape(value)[1:]], 0))
