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
from replicator.graph.ir import shapes
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
    layout: rows.Parts

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
                f"was given {errors.repr_of(sparse_delta)}",
                "it takes tf.IndexedSlices(values, indices).",
            )
        shape = shapes.defined(self)
        part_slices = self.layout.cut(sparse_delta, shape, self.dtype)
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
