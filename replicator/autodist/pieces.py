# SPDX-License-Identifier: Apache-2.0
"""What of a tensor belongs to each part of a variable, without joining parts for it.

A tensor of the variable's shape is split. Where it is computed element by element of
parts that were joined, each piece is computed of the part: so an optimizer's work is
done part by part, and gradients go to those who have the part, whatever the optimizer
consists of. The same holds for rows of sparse gradients, which optimizers add up first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator.autodist.cuts import Cut
from replicator.autodist.slots import ELEMENTWISE
from replicator.graph.ir import shapes
from replicator.graph.passes import rows

Key = tuple[int, int, tuple[int, ...]]  # a tensor's id, an axis, sizes
Row = tuple[tf.Tensor, tf.Tensor]  # values and indices


class Pieces:
    """Finds the pieces of the tensors of one graph."""

    def __init__(self) -> None:
        self._joined: dict[Key, tuple[tf.Tensor, list[tf.Tensor]]] = {}
        self._made: dict[Key, tuple[tf.Tensor, list[tf.Tensor]]] = {}
        self._rows: dict[int, tuple[Row, list[Row]]] = {}

    def note(self, joined: tf.Tensor, cut: Cut, parts: Sequence[tf.Tensor]) -> None:
        """Notes that a tensor is what parts are, joined."""
        self._joined[_key(joined, cut)] = joined, list(parts)

    def note_rows(self, joined: Row, parts: Sequence[Row]) -> None:
        """Notes that rows are what rows of parts are, joined."""
        self._rows[id(joined[0])] = joined, list(parts)

    def of(self, tensor: tf.Tensor, cut: Cut) -> list[tf.Tensor]:
        """Returns the pieces of a tensor of a variable's shape."""
        key = _key(tensor, cut)
        if key in self._joined:
            return self._joined[key][1]
        if key not in self._made:
            made = (
                self._computed(tensor, cut)
                if self._is_of_parts(tensor, cut, set())
                else tf.split(tensor, cut.sizes, cut.axis)
            )
            self._made[key] = tensor, made
        return self._made[key][1]

    def _is_of_parts(self, tensor: tf.Tensor, cut: Cut, seen: set[int]) -> bool:
        """Whether a tensor is computed element by element of parts that were joined."""
        if _key(tensor, cut) in self._joined:
            return True
        if id(tensor) in seen or not _is_elementwise(tensor, cut):
            return False
        seen.add(id(tensor))
        return any(
            one.shape.rank and self._is_of_parts(one, cut, seen)
            for one in tensor.op.inputs
        )

    def _computed(self, tensor: tf.Tensor, cut: Cut) -> list[tf.Tensor]:
        op = tensor.op
        columns = [
            self.of(one, cut) if one.shape.rank else [one] * len(cut.sizes)
            for one in op.inputs
        ]
        own = zip(*columns, strict=True)
        return [again(op, inputs) for inputs in own]

    # --- Rows -------------------------------------------------------------------------

    def rows_of(self, values: tf.Tensor, indices: tf.Tensor, cut: Cut) -> list[Row]:
        """Returns the rows of each part.

        Args:
            values: Rows of the whole, [n, ...].
            indices: Which, integers [n].
            cut: How the variable is divided.
        """
        known = self._noted(values, indices)
        if known is not None:
            return known()
        if cut.axis:
            return [(own, indices) for own in tf.split(values, cut.sizes, cut.axis)]
        owners = rows.owners_of(indices, cut.sizes)
        split = rows.split(values, indices, owners, len(cut.sizes))
        return list(
            zip(split, rows.local_rows(indices, owners, cut.sizes), strict=True)
        )

    def _noted(
        self, values: tf.Tensor, indices: tf.Tensor
    ) -> Callable[[], list[Row]] | None:
        """Returns what makes the rows of parts, if rows are made of those."""
        noted = self._rows.get(id(values))
        if noted is not None and noted[0][1] is indices:
            found = noted[1]
            return lambda: found
        op = values.op
        if op.type == "UnsortedSegmentSum" and indices.op.type == "Unique":
            return self._added_up(op, indices)
        if op.type not in ELEMENTWISE or not op.inputs:
            return None
        wide = [k for k, one in enumerate(op.inputs) if one.shape.rank != 0]
        if len(wide) != 1:
            return None
        inner = self._noted(op.inputs[wide[0]], indices)
        if inner is None:
            return None

        def computed() -> list[Row]:
            made = []
            for own, places in inner():
                inputs = list(op.inputs)
                inputs[wide[0]] = own
                made.append((again(op, inputs), places))
            return made

        return computed

    def _added_up(
        self, op: tf.Operation, indices: tf.Tensor
    ) -> Callable[[], list[Row]] | None:
        """Does so for rows that were added up where they are the same row."""
        if op.inputs[1] is not indices.op.outputs[1]:
            return None
        inner = self._noted(op.inputs[0], indices.op.inputs[0])
        if inner is None:
            return None

        def added() -> list[Row]:
            made = []
            for own, places in inner():
                unique, segments = tf.unique(places)
                count = tf.size(unique)
                total = tf.math.unsorted_segment_sum(own, segments, count)
                made.append((total, unique))
            return made

        return added


def _key(tensor: tf.Tensor, cut: Cut) -> Key:
    return id(tensor), cut.axis, cut.sizes


def _is_elementwise(tensor: tf.Tensor, cut: Cut) -> bool:
    """Whether each element is computed of the same element of each operand."""
    op = tensor.op
    if op.type not in ELEMENTWISE or not op.inputs:
        return False
    operands = (tensor, *op.inputs)
    return all(shapes.static(one) in ((), cut.shape) for one in operands)


def again(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds an op once more, of one result, with other inputs."""
    return repeated(op, inputs).outputs[0]


def repeated(
    op: tf.Operation, inputs: Sequence[tf.Tensor], name: str | None = None
) -> tf.Operation:
    """Adds an op once more to the default graph, with other inputs.

    Args:
        op: Has attributes that depend on no shape.
        inputs: As many.
        name: What it is called.
    """
    graph = tf.compat.v1.get_default_graph()
    attributes = {
        key: value
        for key, value in op.node_def.attr.items()
        if key not in ("_class", "_output_shapes")
    }
    name = name or op.name.rpartition("/")[2]
    with tf.device(op.device), tf.control_dependencies(_before(op, graph)):
        made: tf.Operation = graph.create_op(
            op.type,
            list(inputs),
            [tensor.dtype for tensor in op.outputs],
            name=name,
            attrs=attributes,
        )
    return made


def _before(op: tf.Operation, graph: tf.Graph) -> list[tf.Operation]:
    return list(op.control_inputs) if op.graph is graph else []
