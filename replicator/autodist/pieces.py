# SPDX-License-Identifier: Apache-2.0
"""Splits tensors into the pieces of a variable's parts, without joining parts first.

A tensor of the variable's shape is split. If it is computed element by element from
joined parts, each piece is computed from its part instead: an optimizer's work is then
done part by part, and gradients go straight to the owners of the parts, whatever ops
the optimizer uses. The same holds for the rows of sparse gradients, which optimizers
add up first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator.autodist.cuts import Cut
from replicator.autodist.slots import ELEMENTWISE
from replicator.graph.ir import shapes
from replicator.graph.passes import rows

Key = tuple[int, int, tuple[int, ...]]  # a tensor's id, an axis, sizes
Row = tuple[tf.Tensor, tf.Tensor]  # (values, indices)


class Pieces:
    """Finds the pieces of the tensors of one graph."""

    def __init__(self) -> None:
        self._joined: dict[Key, tuple[tf.Tensor, list[tf.Tensor]]] = {}
        self._made: dict[Key, tuple[tf.Tensor, list[tf.Tensor]]] = {}
        self._rows: dict[int, tuple[Row, list[Row]]] = {}

    def note(self, joined: tf.Tensor, cut: Cut, parts: Sequence[tf.Tensor]) -> None:
        """Records that a tensor is the join of parts."""
        self._joined[_key(joined, cut)] = joined, list(parts)

    def note_rows(self, joined: Row, parts: Sequence[Row]) -> None:
        """Records that rows are the join of rows of parts."""
        self._rows[id(joined[0])] = joined, list(parts)

    def of(self, tensor: tf.Tensor, cut: Cut) -> list[tf.Tensor]:
        """Returns the pieces of a tensor of a variable's shape."""
        key = _key(tensor, cut)
        if key in self._joined:
            return self._joined[key][1]
        if key not in self._made:
            pieces = (
                self._computed(tensor, cut)
                if self._is_of_parts(tensor, cut, set())
                else tf.split(tensor, cut.sizes, cut.axis)
            )
            self._made[key] = tensor, pieces
        return self._made[key][1]

    def _is_of_parts(self, tensor: tf.Tensor, cut: Cut, seen: set[int]) -> bool:
        """Whether a tensor is computed element by element from joined parts."""
        if _key(tensor, cut) in self._joined:
            return True
        if id(tensor) in seen or not _is_elementwise(tensor, cut):
            return False
        seen.add(id(tensor))
        return any(
            operand.shape.rank and self._is_of_parts(operand, cut, seen)
            for operand in tensor.op.inputs
        )

    def _computed(self, tensor: tf.Tensor, cut: Cut) -> list[tf.Tensor]:
        op = tensor.op
        columns = [
            self.of(operand, cut) if operand.shape.rank else [operand] * len(cut.sizes)
            for operand in op.inputs
        ]
        part_inputs = zip(*columns, strict=True)
        return [again(op, inputs) for inputs in part_inputs]

    # --- Rows -------------------------------------------------------------------------

    def rows_of(self, values: tf.Tensor, indices: tf.Tensor, cut: Cut) -> list[Row]:
        """Returns the rows of each part.

        Args:
            values: Rows of the whole, [n, ...].
            indices: The rows' indices, integers [n].
            cut: How the variable is partitioned.
        """
        part_rows = self._noted(values, indices)
        if part_rows is not None:
            return part_rows()
        if cut.axis:
            return [(piece, indices) for piece in tf.split(values, cut.sizes, cut.axis)]
        owners = rows.owners_of(indices, cut.sizes)
        split = rows.split(values, indices, owners, len(cut.sizes))
        return list(
            zip(split, rows.local_rows(indices, owners, cut.sizes), strict=True)
        )

    def _noted(
        self, values: tf.Tensor, indices: tf.Tensor
    ) -> Callable[[], list[Row]] | None:
        """Returns what makes the rows of parts, if these rows follow from them."""
        noted = self._rows.get(id(values))
        if noted is not None and noted[0][1] is indices:
            part_rows = noted[1]
            return lambda: part_rows
        op = values.op
        if op.type == "UnsortedSegmentSum" and indices.op.type == "Unique":
            return self._added_up(op, indices)
        if op.type not in ELEMENTWISE or not op.inputs:
            return None
        row_inputs = [
            k for k, operand in enumerate(op.inputs) if operand.shape.rank != 0
        ]
        if len(row_inputs) != 1:
            return None
        inner = self._noted(op.inputs[row_inputs[0]], indices)
        if inner is None:
            return None

        def computed() -> list[Row]:
            computed_rows = []
            for part_values, places in inner():
                inputs = list(op.inputs)
                inputs[row_inputs[0]] = part_values
                computed_rows.append((again(op, inputs), places))
            return computed_rows

        return computed

    def _added_up(
        self, op: tf.Operation, indices: tf.Tensor
    ) -> Callable[[], list[Row]] | None:
        """Does the same for rows whose duplicates were added up."""
        if op.inputs[1] is not indices.op.outputs[1]:
            return None
        inner = self._noted(op.inputs[0], indices.op.inputs[0])
        if inner is None:
            return None

        def added() -> list[Row]:
            summed_rows = []
            for part_values, places in inner():
                unique, segments = tf.unique(places)
                count = tf.size(unique)
                total = tf.math.unsorted_segment_sum(part_values, segments, count)
                summed_rows.append((total, unique))
            return summed_rows

        return added


def _key(tensor: tf.Tensor, cut: Cut) -> Key:
    return id(tensor), cut.axis, cut.sizes


def _is_elementwise(tensor: tf.Tensor, cut: Cut) -> bool:
    """Whether each element depends on the same element of each operand only."""
    op = tensor.op
    if op.type not in ELEMENTWISE or not op.inputs:
        return False
    operands = (tensor, *op.inputs)
    return all(shapes.static(operand) in ((), cut.shape) for operand in operands)


def again(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Repeats an op of one result with other inputs; returns the result."""
    return repeated(op, inputs).outputs[0]


def repeated(
    op: tf.Operation, inputs: Sequence[tf.Tensor], name: str | None = None
) -> tf.Operation:
    """Repeats an op in the default graph, with other inputs.

    Args:
        op: An op whose attributes depend on no shape.
        inputs: As many inputs as the op has.
        name: The name of the new op.
    """
    graph = tf.compat.v1.get_default_graph()
    attributes = {
        key: value
        for key, value in op.node_def.attr.items()
        if key not in ("_class", "_output_shapes")
    }
    name = name or op.name.rpartition("/")[2]
    with tf.device(op.device), tf.control_dependencies(_before(op, graph)):
        new_op: tf.Operation = graph.create_op(
            op.type,
            list(inputs),
            [tensor.dtype for tensor in op.outputs],
            name=name,
            attrs=attributes,
        )
    return new_op


def _before(op: tf.Operation, graph: tf.Graph) -> list[tf.Operation]:
    return list(op.control_inputs) if op.graph is graph else []
