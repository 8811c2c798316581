# SPDX-License-Identifier: Apache-2.0
"""Rules for lookups, selections and segment sums: where the axis of examples goes.

Places of examples are positions in a replica's part of the batch: they may select rows
of that part only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator.autodist import kinds
from replicator.autodist.kinds import PLACES, SAME, UNKNOWN, Kind, Value
from replicator.autodist.sizes import grows

Own = Any  # rows.Rows


def _looked_up(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    table, indices = values[0], values[1]
    batch_dims = op.get_attr("batch_dims") if op.type != "Gather" else 0
    axis = _axis(op)
    if axis is None or op.inputs[1].shape.rank is None:
        return UNKNOWN
    if kinds.is_same(table) and indices.kind is Kind.ROWS and not batch_dims:
        if indices.power:
            return UNKNOWN
        return indices.replaced(axis=indices.axis + axis)
    if table.kind is not Kind.ROWS:
        return UNKNOWN
    if kinds.is_same(indices) and axis != table.axis and not batch_dims:
        more = (op.inputs[1].shape.rank - 1) if axis < table.axis else 0
        return table.replaced(axis=table.axis + more)
    if indices.kind is Kind.ROWS and 0 < batch_dims and not table.axis:
        is_aligned = (table.order, table.some) == (indices.order, indices.some)
        is_valid = (
            is_aligned and not indices.axis and not indices.power and axis >= batch_dims
        )
        return table.replaced(by_value=True) if is_valid else UNKNOWN
    if indices.kind is Kind.PLACES and axis == table.axis and table.some is None:
        if op.inputs[1].shape.rank == 1 and indices.order == table.order:
            by_value = table.by_value or indices.some is not None
            return table.replaced(some=indices.some, by_value=by_value)
    return UNKNOWN


def _axis(op: tf.Operation) -> int | None:
    """Returns the axis of a lookup, counted from the first; None if it is unknown."""
    if op.type != "GatherV2":
        return 0
    axis, rank = tf.get_static_value(op.inputs[2]), op.inputs[0].shape.rank
    if axis is None or (axis < 0 and rank is None):
        return None
    return int(axis) + (rank if axis < 0 else 0)


def _looked_up_nd(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    table, indices = values
    rank = op.inputs[1].shape.rank
    if rank is None:
        return UNKNOWN
    if kinds.is_same(table) and indices.kind is Kind.ROWS and not indices.power:
        return indices if indices.axis < rank - 1 else UNKNOWN
    if table.kind is Kind.ROWS and indices.kind is Kind.PLACES and not table.axis:
        if table.some is None and indices.order == table.order and rank == 2:
            return table.replaced(some=indices.some, by_value=True)
    return UNKNOWN


def _one_hot(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value, rank = values[0], op.outputs[0].shape.rank
    if value.kind is not Kind.ROWS or rank is None or value.power:
        return UNKNOWN
    if not all(map(kinds.is_same, values[1:])):
        return UNKNOWN
    axis = op.get_attr("axis") % rank
    return value.replaced(axis=value.axis + (axis <= value.axis))


def _where(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Places where a condition holds, by which tf.boolean_mask selects examples."""
    value = values[0]
    if value.kind is not Kind.ROWS or value.axis or value.some is not None:
        return UNKNOWN
    if op.inputs[0].shape.rank != 1 and value.order:
        return UNKNOWN
    return PLACES.replaced(some=mark(op.inputs[0]), order=value.order)


def mark(tensor: tf.Tensor, depth: int = 8) -> Hashable:
    """Returns a key that is equal for tensors computed alike from the same."""
    op = tensor.op
    if op.type in ("Reshape", "Identity", "Cast"):
        return mark(op.inputs[0], depth)
    value = tf.get_static_value(tensor)
    if value is not None and np.size(value) < 10:
        return np.asarray(value).tobytes()
    if depth and op.inputs and op.type.startswith(("Greater", "Less", "Not", "Equal")):
        operand_marks = tuple(mark(operand, depth - 1) for operand in op.inputs)
        return op.type, tensor.value_index, operand_marks
    return id(op), tensor.value_index


def _ranged(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    if all(map(kinds.is_same, values)):
        return SAME
    begin, end, step = (own.sizes.elements(operand) for operand in op.inputs)
    if begin == [0] and step == [1] and end and grows(end[0]):
        return PLACES
    return UNKNOWN


def _segments(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Sums rows by segment ids that belong to the rows, equal for all batches."""
    rows, ids, count = values
    if rows.kind is not Kind.ROWS or rows.axis:
        return UNKNOWN
    if ids.kind is Kind.ROWS and kinds.is_same(count):
        if (ids.axis, ids.order, ids.some) == (0, rows.order, rows.some):
            return Value(Kind.MEAN, rows.power + 1)
    places = own.sizes.elements(op.inputs[2])
    if ids.kind is Kind.PLACES and ids.some == rows.some and places:
        if grows(places[0]):
            return rows.replaced(some=None)  # the gradient of a selection
    return UNKNOWN


def _times_sparse(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Multiplies a sparse batch by a matrix."""
    indices, entries, shape, matrix = values
    is_valid = indices.kind is Kind.PLACES and entries.kind is Kind.ROWS
    is_valid = is_valid and kinds.is_same(matrix) and not op.get_attr("adjoint_a")
    return Value(Kind.ROWS) if is_valid else UNKNOWN


RULES: dict[str, Any] = {
    **{"GatherV2": _looked_up, "Gather": _looked_up, "ResourceGather": _looked_up},
    **{"GatherNd": _looked_up_nd, "ResourceGatherNd": _looked_up_nd},
    **{"OneHot": _one_hot, "Where": _where, "Range": _ranged},
    **{"UnsortedSegmentSum": _segments, "SparseTensorDenseMatMul": _times_sparse},
}
