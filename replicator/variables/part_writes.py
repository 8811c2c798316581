# SPDX-License-Identifier: Apache-2.0
"""Writes to a piece of a variable, whole or in parts: scatters and v[i].assign.

Of a variable in parts, rows go to the parts that hold them. Writes to anything but
rows, slices of any kind, assign the whole: the new value is computed from the current
one and assigned to all parts.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import autograph, variables
from replicator.graph.ir import shapes
from replicator.graph.passes import rows
from replicator.primitives import base
from replicator.variables import (
    agreement,
    in_graphs,
    part_values,
    python_calls,
    single_device,
    unbuilt,
)

_SUM = tf.VariableAggregation.SUM


class PartWriter(variables.HandleVariable):
    """Gives ReplicatedVariable the methods that write a part of the value."""

    @autograph.not_converted
    def count_up_to(self, limit: int) -> tf.Tensor:
        """Adds 1 and returns the value before, up to `limit`; see tf.Variable's."""
        if context.current() is not None or single_device.view() is not None:
            return variables.HandleVariable.count_up_to(self, limit)
        before = tf.identity(self.read_value())
        eager = tf.executing_eagerly()
        with tf.control_dependencies(None if eager else [before]):
            written = self._write_piece("count_up_to", limit)
        with tf.control_dependencies(None if eager else [written.op]):
            return tf.identity(before)

    def _write_piece(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Writes a part of the value."""
        if context.current() is None:
            python_calls.refuse_write(self)
            return self._write_part_of_all(method, *args, **kwargs)
        return self._write_part(method, *args, **kwargs)

    def _write_part_of_all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Writes a part of the value, outside a step."""
        assignments = []
        if self.placement.is_aggregated:
            # The write needs the aggregated value in place, so assign that first.
            with in_graphs.known_before(args, kwargs):
                assignment = self.assign(self._aggregated(), read_value=False)
            assignments = [] if assignment is None else [assignment]
        with in_graphs.known_before(args, kwargs), tf.control_dependencies(assignments):
            return self._write_all(
                lambda component, r: (
                    tf.no_op()
                    if r and self.placement.adds_up
                    else self._write_component(component, method, *args, **kwargs)
                ),
                True,
            )

    def _write_component(
        self, component: tf.Variable, method: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Writes a part of a component; only the first write gets the op's name."""
        if component is not self.outside[0]:
            args, kwargs = args[:2], {**kwargs}
            if "name" in kwargs:
                kwargs["name"] = None
        return getattr(component, method)(*args, **kwargs)

    def _write_part(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Writes a part of the value, inside a step."""
        replica = context.require(method)
        unbuilt.is_done(self, replica)
        claim = agreement.claim(self, replica)
        write = getattr(variables.HandleVariable, method)
        if claim is not None or agreement.is_equal(self, replica):
            with self._entered(replica, claim):
                return write(self, *args, **kwargs)
        with replica.agreeing_on(self.name, method, self.key):
            # The replicas agree on the mean of the whole value, whichever parts each of
            # them writes. If agreeing fails, nothing has been written.
            sums = self.aggregation == _SUM and not replica.mode.updating
            computes = self.placement.owner is not None or part_values.has_value(method)
            if computes or sums:
                return part_values.write(self, method, *args, **kwargs)
            with self._entered(replica, None):
                written = write(self, *args, **kwargs)
                with tf.control_dependencies([written.op]):
                    return self.assign(self.read_value())


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
