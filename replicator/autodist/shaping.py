# SPDX-License-Identifier: Apache-2.0
"""Rules for reshaping, slicing, joining and splitting: where the axis of examples goes.

Pure functions of an op and of the Values of its inputs; see rows.py.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from replicator.autodist import kinds
from replicator.autodist.kinds import PLACES, UNKNOWN, Kind, Value
from replicator.autodist.sizes import (
    UNKNOWN_SIZE,
    Element,
    are_equal,
    count,
    each,
    grown,
    grows,
    known,
)
from replicator.graph.ir import shapes

Own = Any  # rows.Rows
OF_PLACES = frozenset({"Reshape", "ExpandDims", "Squeeze", "Pack", "ConcatV2"})


def broadcast(op: tf.Operation, value: Value, axis: int, own_rows: int | None) -> Value:
    """Returns the Value of a broadcast to a shape with an axis of examples.

    Args:
        op: The op that broadcasts.
        value: What it broadcasts.
        axis: The axis of the examples.
        own_rows: How many rows each example has; None if that is unknown.
    """
    rank_before, rank = op.inputs[0].shape.rank, op.outputs[0].shape.rank
    if rank_before is None or rank is None:
        return UNKNOWN
    axis_before = axis - (rank - rank_before)
    if value.kind is Kind.ROWS:
        return value.replaced(axis=axis) if value.axis == axis_before else UNKNOWN
    if axis_before >= 0 and shapes.sizes(op.inputs[0])[axis_before] != 1:
        return UNKNOWN
    return _repeated(op, value, axis, own_rows)


def _repeated(op: tf.Operation, value: Value, axis: int, own_rows: int | None) -> Value:
    """Returns the rows of a value repeated along an axis, some for each example."""
    rows = Value(Kind.ROWS, axis=axis, each=own_rows)
    if value.kind is Kind.SAME:
        return rows.replaced(power=value.power, by_value=False)
    if kinds.is_level(value):
        return rows.replaced(mixed=op)
    return rows if value.kind is Kind.DRAWN else UNKNOWN


def _reshaped(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value, before = values[0], shapes.static(op.inputs[0])
    if value.kind is Kind.PLACES:
        return PLACES.replaced(some=value.some)
    if value.kind is not Kind.ROWS or before is None:
        return _flat(op, value) if value.kind is Kind.ROWS else UNKNOWN
    target = own.sizes.elements(op.inputs[1])
    if target is None:
        return _like(op, value)
    place = _grown_place(target, value)
    if place is None or not _fits(before[value.axis + 1 :], target, place):
        return UNKNOWN
    outer = count(before[: value.axis])
    own_rows = _rows_each(value, before[value.axis + 1 :], target, place)
    if outer == count(known(target[:place])):
        sizes = own.sizes.of_shape(op.inputs[0])
        if outer != UNKNOWN_SIZE or are_equal(sizes[: value.axis], target[:place]):
            return value.replaced(axis=place, each=own_rows)
        return UNKNOWN
    if all(size == 1 for size in target[:place]):
        # The axes in front of the examples' are merged into it: examples are
        # interleaved. Of as many rows in all, as many blocks have as many each.
        merged = each(target[place])
        if target[place] == -1 and isinstance(outer, int) and own_rows is not None:
            merged = own_rows * outer
        per_block = own_rows if target[place] == -1 or merged is None else None
        blocks = outer if isinstance(outer, int) else (outer, per_block or id(op))
        order: Hashable = ("blocks", blocks, value.order)
        return value.replaced(axis=place, order=order, each=merged)
    return UNKNOWN


def _rows_each(
    value: Value, inner: Sequence[int | None], target: Sequence[Element], place: int
) -> int | None:
    """Returns how many rows each example has in a new shape, if no axes are merged."""
    if target[place] != -1 and each(target[place]) is not None:
        return each(target[place])
    before, after = count(inner), count(known(target[place + 1 :]))
    if value.each is None or not (isinstance(before, int) and isinstance(after, int)):
        return None
    return value.each * before // after if after > 0 else None


def _flat(op: tf.Operation, value: Value) -> Value:
    """Reshapes a tensor of unknown rank whose first axis holds the examples."""
    target = tf.get_static_value(op.inputs[1])
    if value.axis or target is None or not len(target) or target[0] != -1:
        return UNKNOWN
    return value.replaced(each=None)


def _like(op: tf.Operation, value: Value) -> Value:
    """Reshapes to a shape of which only the rank and some sizes are known."""
    before, after = shapes.static(op.inputs[0]), shapes.static(op.outputs[0])
    is_same = before is not None and before == after
    return value if is_same and list(before or ()).count(None) == 1 else UNKNOWN


def _grown_place(target: Sequence[Element], value: Value) -> int | None:
    """Returns the index of the size in a new shape that grows with the examples."""
    place, _ = grown([1 if size == -1 else size for size in target])
    if place is not None:
        return place
    if -1 not in target or None in target:
        # The number of rows left after a selection equals no other size.
        unknown = [n for n, size in enumerate(target) if size is None]
        if value.some is not None and len(unknown) == 1 and -1 not in target:
            return unknown[0]
        return None
    if any(map(grows, target)):
        return None
    return list(target).index(-1)


def _fits(inner: Sequence[int | None], target: Sequence[Element], place: int) -> bool:
    """Whether no row of a new shape mixes two examples."""
    after = known(target[place + 1 :])
    size = math.prod(n for n in after if n is not None and n > 0)
    if target[place] != -1 and (None in after or -1 in after):
        return True  # the other sizes divide what is left per example
    return not size or math.prod(n for n in inner if n is not None) % size == 0


def _expanded(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value, axis = values[0], tf.get_static_value(op.inputs[1])
    rank = op.outputs[0].shape.rank
    if value.kind is Kind.PLACES:
        return value
    if axis is None or rank is None:
        return UNKNOWN
    return value.replaced(axis=value.axis + (int(axis) % rank <= value.axis))


def _squeezed(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value, before = values[0], shapes.static(op.inputs[0])
    if value.kind is Kind.PLACES:
        return value
    if before is None:
        return UNKNOWN
    axes = [axis % len(before) for axis in op.get_attr("squeeze_dims")]
    if not axes:
        if None in before[: value.axis] + before[value.axis + 1 :]:
            return UNKNOWN
        axes = [n for n, size in enumerate(before) if size == 1]
    if value.axis in axes:
        return UNKNOWN
    return value.replaced(axis=value.axis - sum(axis < value.axis for axis in axes))


def _transposed(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value, order = values[0], tf.get_static_value(op.inputs[1])
    if order is None or value.kind is not Kind.ROWS:
        return UNKNOWN
    return value.replaced(axis=[int(axis) for axis in order].index(value.axis))


def _alike(values: Sequence[Value]) -> Value | None:
    """Returns the common Value of operands that all have aligned rows, else None."""
    if {v.kind for v in values} != {Kind.ROWS}:
        return None
    if len({(v.axis, v.order, v.some, v.power) for v in values}) > 1:
        return None
    by_value, own_rows = any(v.by_value for v in values), kinds.each(values)
    return values[0].replaced(by_value=by_value, each=own_rows)


def _packed(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    axis, rank = op.get_attr("axis"), op.outputs[0].shape.rank
    if values[0].kind is Kind.PLACES and rank == 2 and axis in (1, -1):
        return PLACES.replaced(some=values[0].some)
    value = _alike(values)
    if value is None or rank is None:
        return UNKNOWN
    return value.replaced(axis=value.axis + (axis % rank <= value.axis))


def _unpacked(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value, rank = values[0], op.inputs[0].shape.rank
    if rank is None or value.kind is not Kind.ROWS:
        return UNKNOWN
    axis = op.get_attr("axis") % rank
    if axis == value.axis:
        return UNKNOWN
    return value.replaced(axis=value.axis - (axis < value.axis))


def _concatenated(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    values = values[:-1]
    axis, rank = tf.get_static_value(op.inputs[-1]), op.outputs[0].shape.rank
    if values[0].kind is Kind.PLACES and axis is not None and axis:
        return PLACES.replaced(some=values[0].some)
    value = _alike(values)
    if value is None or axis is None or rank is None:
        return UNKNOWN
    if int(axis) % rank != value.axis:
        return value
    # A concatenation of batches: a replica's examples are no longer contiguous.
    own_rows = {v.each for v in values}
    order: Hashable = ("behind", len(values), value.order)
    if None in own_rows or len(own_rows) > 1:
        order = ("apart", id(op), value.order)  # blocks that are not equally long
    total = None if None in own_rows else sum(v.each or 0 for v in values)
    return value.replaced(order=order, each=total)


def _split(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    data_index, axis_index = (1, 0) if op.type == "Split" else (0, 2)
    value, rank = values[data_index], op.inputs[data_index].shape.rank
    axis = tf.get_static_value(op.inputs[axis_index])
    if value.kind is not Kind.ROWS or axis is None or rank is None:
        return UNKNOWN
    if int(axis) % rank != value.axis:
        return value
    order = value.order
    if op.type == "Split" and isinstance(order, tuple) and order[:1] == ("behind",):
        if order[1] == len(op.outputs):
            own_rows = value.each and value.each // order[1]
            return value.replaced(order=order[2], each=own_rows)
    return UNKNOWN


def _sliced(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """A slice that keeps all examples."""
    value, rank = values[0], op.inputs[0].shape.rank
    spec = tf.get_static_value(op.inputs[1])
    if value.kind is not Kind.ROWS:
        return UNKNOWN
    is_vector = op.inputs[1].shape.rank == 1
    num_bounds = op.inputs[1].shape.as_list()[0] if is_vector else None
    if num_bounds is None:
        return UNKNOWN
    masks = {
        name: op.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    strides = tf.get_static_value(op.inputs[3])
    axis = after = 0
    for n in range(num_bounds):
        bit = 1 << n
        if masks["ellipsis"] & bit:
            if rank is None:
                return UNKNOWN
            new_axes = bin(masks["new_axis"] >> (n + 1)).count("1")
            skipped = rank - axis - (num_bounds - n - 1 - new_axes)
            if axis <= value.axis < axis + skipped:
                return value.replaced(axis=after + value.axis - axis)
            axis, after = axis + skipped, after + skipped
        elif masks["new_axis"] & bit:
            after += 1
        elif axis == value.axis:
            starts = masks["begin"] & bit or (spec is not None and spec[n] == 0)
            whole = strides is not None and strides[n] == 1
            if masks["shrink_axis"] & bit or not (starts and whole):
                return UNKNOWN
            if not masks["end"] & bit and not _is_end(own, op, n, value):
                return UNKNOWN
            return value.replaced(axis=after)
        else:
            axis += 1
            after += not masks["shrink_axis"] & bit
    return value.replaced(axis=value.axis - axis + after)


def _slice_gradient(
    own: Own, op: tf.Operation, k: int, values: Sequence[Value]
) -> Value:
    """The gradient of a slice that keeps all examples."""
    value, (place, is_known) = values[-1], grown(own.sizes.elements(op.inputs[0]))
    begin = tf.get_static_value(op.inputs[1])
    if value.kind is not Kind.ROWS or not is_known or place is None or begin is None:
        return UNKNOWN
    masks = ("ellipsis_mask", "new_axis_mask")
    if any(op.get_attr(mask) for mask in masks) or place >= len(begin):
        return UNKNOWN if place < len(begin) else value.replaced(axis=place)
    bit = 1 << place
    is_full = op.get_attr("begin_mask") & bit and op.get_attr("end_mask") & bit
    return value.replaced(axis=place) if is_full else UNKNOWN


def _is_end(own: Own, op: tf.Operation, n: int, value: Value) -> bool:
    """Whether a slice ends at the last example."""
    end, sizes = own.sizes.elements(op.inputs[2]), own.sizes.of_shape(op.inputs[0])
    if end is None or sizes is None:
        return False
    does_grow = grows(end[n]) and grows(sizes[value.axis])
    return does_grow and _is_its_size(op.inputs[2], op.inputs[0], n, value)


def _is_its_size(end: tf.Tensor, source: tf.Tensor, n: int, value: Value) -> bool:
    """Whether a bound is read from the shape of the sliced tensor itself."""
    op = end.op
    if op.type == "Pack":
        op = op.inputs[n].op
    while op.type in ("Identity", "Cast", "StridedSlice"):
        op = op.inputs[0].op
    return op.type == "Shape" and op.inputs[0] is source and not value.order


def _cut(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """A tf.slice that keeps all examples."""
    value = values[0]
    begin, size = (tf.get_static_value(operand) for operand in op.inputs[1:])
    if value.kind is not Kind.ROWS or begin is None or begin[value.axis]:
        return UNKNOWN
    return value if size is not None and size[value.axis] == -1 else UNKNOWN


def _tiled(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value, times = values[0], own.sizes.elements(op.inputs[1])
    axis, is_known = grown(times)
    if times is None or not is_known:
        return UNKNOWN
    if value.kind is Kind.ROWS:
        if axis is not None:
            return UNKNOWN
        if times[value.axis] == 1:
            return value
        if not isinstance(times[value.axis], int):
            return UNKNOWN
        own_rows = value.each and value.each * times[value.axis]
        order = ("behind", times[value.axis], value.order)
        return value.replaced(order=order, each=own_rows)
    if axis is None:
        return value if kinds.is_same(value) or value.kind is Kind.MEAN else UNKNOWN
    return _repeated(op, value, axis, _tiles(op, axis, times))


def _tiles(op: tf.Operation, axis: int, times: Sequence[Element]) -> int | None:
    """Returns how many rows each example has of what is tiled by their number."""
    size, tiles = shapes.sizes(op.inputs[0])[axis], each(times[axis])
    return None if size is None or tiles is None else size * tiles


def _padded(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value, widths = values[0], tf.get_static_value(op.inputs[1])
    if value.kind is not Kind.ROWS or widths is None or any(widths[value.axis]):
        return UNKNOWN
    if value.power and op.type == "PadV2":
        return UNKNOWN
    return value


def _reverse_sequence(
    own: Own, op: tf.Operation, k: int, values: Sequence[Value]
) -> Value:
    value, lengths = values
    if value.kind is not Kind.ROWS or lengths.kind not in (Kind.ROWS, Kind.SAME):
        return UNKNOWN
    is_valid = (
        op.get_attr("batch_dim") == value.axis and op.get_attr("seq_dim") != value.axis
    )
    return value if is_valid and lengths.kind is Kind.ROWS else UNKNOWN


def _categorical(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value = values[0]
    if value.kind is not Kind.ROWS or value.axis or value.power:
        return UNKNOWN
    return value if kinds.is_same(values[1]) else UNKNOWN


RULES: dict[str, Any] = {
    **{"Reshape": _reshaped, "ExpandDims": _expanded, "Squeeze": _squeezed},
    **{"Transpose": _transposed, "Pack": _packed, "Unpack": _unpacked},
    **{"ConcatV2": _concatenated, "Split": _split, "SplitV": _split},
    **{
        "StridedSliceGrad": _slice_gradient,
        "StridedSlice": _sliced,
        "Slice": _cut,
        "Tile": _tiled,
    },
    **{"Pad": _padded, "PadV2": _padded, "MirrorPad": _padded},
    **{"ReverseSequence": _reverse_sequence, "Multinomial": _categorical},
    "StatelessMultinomial": _categorical,
}
