# SPDX-License-Identifier: Apache-2.0
"""Writes to a piece of a variable in parts: scatters and v[i].assign.

Rows go to the parts that hold them. Writes to anything but rows, slices of any kind,
assign the whole: the new value is computed from the current one and assigned to all
parts.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import autograph, variables
from replicator.graph.passes import rows
from replicator.primitives import base
from replicator.variables import part_values

_BY_ROWS = frozenset(
    "scatter_add scatter_sub scatter_update scatter_max scatter_min scatter_mul "
    "scatter_div".split()
)


class SplitWriter(variables.HandleVariable):
    """Gives PartitionedVariable the methods that write a piece."""

    parts: tuple[Any, ...]
    axis: int
    sizes: tuple[int, ...]

    def _write_piece(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Writes rows to their parts, or assigns the whole value with a new piece."""
        if method in _BY_ROWS:
            return self._write_rows(method, *args, **kwargs)
        return part_values.write(self, method, *args, **kwargs)

    def _write_rows(
        self,
        method: str,
        sparse_delta: Any,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Writes rows, each to the part that holds it."""
        if not isinstance(sparse_delta, tf.IndexedSlices):
            raise base.bad_argument(
                f"{method} of variable {self.name}",
                f"was given {errors.shown(sparse_delta)}",
                "it takes tf.IndexedSlices(values, indices).",
            )
        part_slices = cut(sparse_delta, self.parts, self.axis, self.sizes, self.dtype)
        return self.write_parts(
            lambda part, k: _done(getattr(part, method)(part_slices[k])), True, method
        )

    @autograph.not_converted
    def batch_scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Assigns rows of each matrix in a batch."""
        indices = tf.convert_to_tensor(sparse_delta.indices)
        batches = tf.meshgrid(
            *(
                tf.range(size, dtype=indices.dtype)
                for size in tf.unstack(tf.shape(indices, indices.dtype))
            ),
            indexing="ij",
        )
        places = tf.stack([*batches[:-1], indices], -1)
        return self.scatter_nd_update(places, sparse_delta.values)


def _done(written: Any) -> Any:
    """Returns the op to wait for, from what a variable's method returns."""
    return None if tf.executing_eagerly() else getattr(written, "op", written)


def cut(
    slices: tf.IndexedSlices,
    parts: Any,
    axis: int,
    sizes: tuple[int, ...],
    dtype: tf.DType,
) -> list[tf.IndexedSlices]:
    """Divides the given rows among the parts.

    Args:
        slices: Rows of the whole; their values may be a single number for all.
        parts: The parts.
        axis: The axis along which they are joined.
        sizes: The sizes of the parts along the axis.
        dtype: The variable's dtype.
    """
    values = tf.convert_to_tensor(slices.values, dtype)
    indices = tf.convert_to_tensor(slices.indices)
    shapes = [tf.constant(part.shape.as_list(), tf.int32) for part in parts]
    if axis:
        if values.shape.rank == 0:
            part_values = [values] * len(sizes)
        else:  # the axes of the indices replace the first one of the variable
            part_values = tf.split(values, sizes, axis - 1 + (indices.shape.rank or 1))
        part_indices = [indices] * len(sizes)
    else:
        flat = indices if indices.shape.rank == 1 else rows.vector(indices)[0]
        owners = rows.owners_of(flat, sizes)
        if values.shape.rank == 0:
            part_values = [values] * len(sizes)
        else:
            row = parts[0].shape.as_list()[1:]
            if values.shape.rank != 1 + len(row):
                values = tf.reshape(values, [-1, *row])
            part_values = rows.split(values, flat, owners, len(sizes))
        part_indices = rows.local_rows(flat, owners, sizes)
    return [
        tf.IndexedSlices(*fields)
        for fields in zip(part_values, part_indices, shapes, strict=True)
    ]
