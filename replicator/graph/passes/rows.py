# SPDX-License-Identifier: Apache-2.0
"""Rows of a partitioned tensor: which part holds each, and how they are joined.

Pure functions of tensors and sizes, for variables and for passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import tensorflow as tf

from replicator.graph.ir import shapes

Reader = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Parts:
    """How a tensor is divided along one axis.

    Attributes:
        axis: The axis.
        sizes: The sizes of the parts along it.
    """

    axis: int
    sizes: tuple[int, ...]

    def split(self, whole: tf.Tensor, axis: int | None = None) -> list[tf.Tensor]:
        """Splits a tensor, along another axis if it has others than the whole."""
        return list(tf.split(whole, self.sizes, self.axis if axis is None else axis))

    def join(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Joins the parts of a tensor."""
        return tf.concat(parts, self.axis)

    def rows(self, readers: Sequence[Reader], indices: tf.Tensor) -> tf.Tensor:
        """Returns rows of the whole, each read from the part that holds it.

        Args:
            readers: `readers[k]` returns rows of part k.
            indices: Rows of the whole, integers of any shape.

        Returns:
            A tensor of shape [*indices.shape, ...].
        """
        if self.axis:
            columns = [reader(indices) for reader in readers]
            # Each has the axes of the indices in place of its first axis.
            return tf.concat(columns, self.axis - 1 + tf.rank(indices))
        flat, _ = vector(indices)
        owners = owners_of(flat, self.sizes)
        part_rows = local_rows(flat, owners, self.sizes)
        value = tf.dynamic_stitch(
            places_of(owners, len(self.sizes)),
            [reader(local) for reader, local in zip(readers, part_rows, strict=True)],
        )
        if indices.shape.rank == 1:
            return value
        shape = tf.concat([tf.shape(indices), tf.shape(value)[1:]], 0)
        return tf.reshape(value, shape)

    def cut(
        self, slices: tf.IndexedSlices, shape: Sequence[int], dtype: tf.DType
    ) -> list[tf.IndexedSlices]:
        """Divides rows among the parts that hold them.

        Args:
            slices: Rows of the whole; their values may be a single number for all.
            shape: The shape of the whole.
            dtype: The dtype of the whole.
        """
        values = tf.convert_to_tensor(slices.values, dtype)
        indices = tf.convert_to_tensor(slices.indices)
        count, is_number = len(self.sizes), values.shape.rank == 0
        part_values, part_indices = [values] * count, [indices] * count
        if self.axis:
            if not is_number:  # the axes of the indices replace the first of the whole
                axis = self.axis - 1 + (indices.shape.rank or 1)
                part_values = self.split(values, axis)
        else:
            flat = indices if indices.shape.rank == 1 else vector(indices)[0]
            owners = owners_of(flat, self.sizes)
            if not is_number:
                if values.shape.rank != len(shape):
                    values = tf.reshape(values, [-1, *shape[1:]])
                part_values = split(values, flat, owners, count)
            part_indices = local_rows(flat, owners, self.sizes)
        part_shapes = [[*shape] for _ in self.sizes]
        for part_shape, size in zip(part_shapes, self.sizes, strict=True):
            part_shape[self.axis] = size
        return [
            tf.IndexedSlices(own, rows, tf.constant(part_shape, tf.int32))
            for own, rows, part_shape in zip(
                part_values, part_indices, part_shapes, strict=True
            )
        ]


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Returns the offset at which each part begins."""
    return [sum(sizes[:k]) for k in range(len(sizes))]


def vector(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns indices as a vector, and its shape, by the ops that TensorFlow uses.

    TensorFlow does the same where it differentiates a lookup. Values computed alike
    from the same operands are recognized as equal, and computed once.

    Args:
        indices: Integers of any shape.
    """
    size = tf.expand_dims(tf.size(indices), 0)
    return tf.reshape(indices, size), size


def owners_of(flat: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Returns the part that holds each row, an int32 [rows].

    Rows that do not exist are assigned to the first or the last part, which refuses
    them.

    Args:
        flat: Rows of the whole, integers [rows].
        sizes: The sizes of the parts along axis 0.
    """
    owners = tf.zeros_like(flat, tf.int32)
    for bound in offsets_of(sizes)[1:]:
        owners += tf.cast(flat >= tf.constant(bound, flat.dtype), tf.int32)
    return owners


def local_rows(
    flat: tf.Tensor, owners: tf.Tensor, sizes: Sequence[int]
) -> list[tf.Tensor]:
    """Returns the rows that each part holds, numbered within the part.

    Args:
        flat: Rows of the whole, integers [rows].
        owners: The result of `owners_of`.
        sizes: The sizes of the parts along axis 0.
    """
    split = tf.dynamic_partition(flat, owners, len(sizes))
    return [
        part_rows - tf.constant(offset, flat.dtype)
        for part_rows, offset in zip(split, offsets_of(sizes), strict=True)
    ]


def places_of(owners: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Returns the positions of each part's rows in a list of rows.

    Args:
        owners: The result of `owners_of` for the list.
        count: The number of parts.
    """
    return list(tf.dynamic_partition(tf.range(tf.size(owners)), owners, count))


def split(
    values: tf.Tensor, flat: tf.Tensor, owners: tf.Tensor, count: int
) -> list[tf.Tensor]:
    """Splits rows by the part that holds them.

    On CPUs, tf.dynamic_partition takes as long for rows of one number as for rows of
    64, several times as long as tf.gather. But it fails, where tf.gather is silent, if
    there are more rows than indices.

    Args:
        values: The rows, [rows, ...].
        flat: Their numbers in the whole, integers [rows].
        owners: The result of `owners_of` for `flat`.
        count: The number of parts.
    """
    if values.shape[1:].num_elements() != 1 or not as_many(values, flat):
        return list(tf.dynamic_partition(values, owners, count))
    return [tf.gather(values, places) for places in places_of(owners, count)]


def as_many(values: tf.Tensor, indices: tf.Tensor) -> bool:
    """Whether there is certainly one row for each index, even if of unknown number.

    Args:
        values: Rows, [rows, ...].
        indices: The numbers of these rows, a vector.
    """
    values_shape, indices_shape = shapes.static(values), shapes.static(indices)
    if (
        values_shape
        and indices_shape
        and None not in (values_shape[0], indices_shape[0])
    ):
        return values_shape[0] == indices_shape[0]
    if tf.executing_eagerly():
        return False
    count = _count(values)
    return count is not None and count == _count(indices)


def _count(tensor: tf.Tensor) -> Hashable:
    """Returns a key that is equal for equal numbers of rows; None if nothing is known.

    TensorFlow's gradient of a lookup reshapes rows and indices to one count; rows and
    indices of a part are at the same positions.
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
            static_size = tf.get_static_value(size)
            return (
                None
                if static_size is not None and (static_size < 0).any()
                else id(size)
            )
        else:
            return None


def _is_scalar(op: tf.Operation, k: int) -> bool:
    return bool(op.inputs[k].shape.rank == 0)


def _is_vector(op: tf.Operation, k: int) -> bool:
    return bool(op.inputs[k].shape.rank == 1)


def gathers_rows(op: tf.Operation) -> bool:
    """Whether a GatherV2 gathers along the first axis, without batch dimensions."""
    return not op.get_attr("batch_dims") and tf.get_static_value(op.inputs[2]) == 0
