# SPDX-License-Identifier: Apache-2.0
"""Rules for ops on tensors that have rows of examples.

One axis of such a tensor holds the examples. An op keeps them apart or reduces them; if
it does neither, its result is unknown, and losses made of it are refused. So each op is
classified by what it does to that axis; tables.py lists the types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator.autodist import (
    kinds,
    lookups,
    powers,
    products,
    shaping,
    sizes,
    tables,
)
from replicator.autodist.kinds import SAME, STATISTIC, UNKNOWN, Kind, Value
from replicator.autodist.sizes import Sizes, grown
from replicator.autodist.wholes import Whole
from replicator.graph.ir import shapes

Rule = Callable[["Rows", tf.Operation, int, Sequence[Value]], Value]


class Rows:
    """Infers the results of ops on rows.

    Args:
        sizes: Infers the elements of shapes.
        is_data: Whether an operand of an op may be that of the whole batch.
    """

    def __init__(
        self, sizes: Sizes, is_data: Callable[[tf.Operation, int], bool]
    ) -> None:
        self.sizes, self.is_data = sizes, is_data

    def find(self, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
        """Returns the Value of an op's k-th result, given those of its inputs.

        Some of these have rows, or are places of rows.
        """
        rule = _RULES.get(op.type)
        if rule is None:
            return UNKNOWN
        operands = kinds.alone(values)
        wholes_needed = self._put_together(op, operands)
        operands = [
            SAME if Whole(op, n) in wholes_needed else v for n, v in enumerate(operands)
        ]
        found = {value.kind for value in operands}
        of_places = Kind.PLACES in found and Kind.ROWS not in found
        if Kind.UNKNOWN in found or (of_places and op.type not in _OF_PLACES):
            return UNKNOWN
        result = rule(self, op, k, operands)
        return kinds.made_of(result, [*values, SAME.replaced(wholes=wholes_needed)])

    def _put_together(
        self, op: tf.Operation, values: Sequence[Value]
    ) -> frozenset[Whole]:
        """Returns the operands combined with rows that may be of the whole batch."""
        if op.type not in tables.ELEMENTWISE and op.type not in _COMBINING:
            return frozenset()
        return frozenset(
            Whole(op, n)
            for n, value in enumerate(values)
            if value.kind not in (Kind.SAME, Kind.ROWS, Kind.DRAWN, Kind.PLACES)
            and self.is_data(op, n)
        )


# Besides element-wise ops.
_COMBINING = ("GatherV2", "MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum")
# Ops whose results are places, too; of places alone, all others make what is unknown.
_OF_PLACES = tables.PASSED_ON.union(shaping.OF_PLACES)


def _passed(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    (value, *_) = values
    if op.type == "Cast" and value.power:
        if op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating:
            return UNKNOWN
    return value


# --- Element by element ---------------------------------------------------------------


def _elementwise(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Combines rows with aligned rows, and each row with operands that have none."""
    if op.type == "Select" and op.inputs[0].shape.rank == 1 != op.inputs[1].shape.rank:
        return _selected(values)
    rows = aligned(op, values)
    if rows is None:
        return UNKNOWN
    others = [v for v in values if v.kind is not Kind.ROWS]
    power = _power(op, values)
    if power is None:
        return UNKNOWN
    by_value = any(v.by_value for v in rows) or any(
        v.kind is not Kind.SAME for v in others
    )
    result = rows[0].replaced(
        power=power, by_value=by_value, mixed=None, each=kinds.each(rows)
    )
    rank = op.outputs[k].shape.rank
    first = next(n for n, v in enumerate(values) if v.kind is Kind.ROWS)
    before = op.inputs[first].shape.rank
    if rank is not None and before is not None:
        result = result.replaced(axis=result.axis + rank - before)
    if any(v.kind not in (Kind.SAME, Kind.DRAWN) for v in others):
        return result.replaced(mixed=op)
    return result


def _quantized(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Rounds elements between bounds; bounds not given depend on all elements."""
    return _elementwise(own, op, k, values) if op.get_attr("range_given") else UNKNOWN


def _replaced(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    rows = [value for value in values if value.kind is Kind.ROWS]
    if len(rows) > 1 or rows[0].power:
        return UNKNOWN
    if not all(kinds.is_same(v) for v in values if v.kind is not Kind.ROWS):
        return UNKNOWN
    return rows[0].replaced(by_value=True)


def _selected(values: Sequence[Value]) -> Value:
    """Selects rows by a vector with an element per row, as in TensorFlow 1."""
    own_rows = kinds.each(values)
    operands = [v.replaced(by_value=True, mixed=None, each=own_rows) for v in values]
    test, on_true, on_false = operands
    if (
        test.kind is not Kind.ROWS
        or test.power
        or test.replaced(power=on_true.power) != on_true
    ):
        return UNKNOWN
    return on_true if on_true == on_false else UNKNOWN


def aligned(op: tf.Operation, values: Sequence[Value]) -> list[Value] | None:
    """Returns the operands that have rows; None unless all operands are aligned."""
    pairs = list(zip(op.inputs, values, strict=True))
    rows = [(tensor, v) for tensor, v in pairs if v.kind is Kind.ROWS]
    if not rows:
        return None  # places of examples, computed with as numbers
    ranks = {tensor.shape.rank for tensor, _ in rows}
    if None in ranks:
        scalars = all(t.shape.rank == 0 for t, v in pairs if v.kind is not Kind.ROWS)
        if not scalars or len(rows) > 1:
            return None
        return [v for _, v in rows]
    axes_from_end = {v.axis - (tensor.shape.rank or 0) for tensor, v in rows}
    if len(axes_from_end) > 1 or len({(v.order, v.some) for _, v in rows}) > 1:
        return None
    (axis_from_end,) = axes_from_end
    for tensor, v in pairs:
        if v.kind is Kind.ROWS:
            continue
        rank = tensor.shape.rank
        if v.kind is Kind.PLACES or rank is None:
            return None
        if rank >= -axis_from_end and shapes.sizes(tensor)[axis_from_end] != 1:
            return None
    return [v for _, v in rows]


def _power(op: tf.Operation, values: Sequence[Value]) -> float | None:
    """Returns the power of an element-wise op's result; None if it has none."""
    operand_powers = []
    for tensor, value in zip(op.inputs, values, strict=True):
        has_power = value.kind in (Kind.SAME, Kind.ROWS, Kind.DRAWN)
        if not has_power and not kinds.is_level(value):
            return None
        operand_powers.append(
            0 if not has_power else None if powers.is_zero(tensor) else value.power
        )
    return powers.power_of(op.type, operand_powers)


# --- Reductions -----------------------------------------------------------------------


def _reduced(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value, tensor = values[0], op.inputs[0]
    axes, rank = _axes(op.inputs[1]), tensor.shape.rank
    if value.kind is not Kind.ROWS or not kinds.is_same(values[1]):
        return UNKNOWN
    reduces_all = _all_axes(op, axes, rank)
    if not reduces_all and (axes is None or rank is None):
        return UNKNOWN
    reduced_axes = [axis % rank for axis in axes or () if rank]
    if reduces_all or value.axis in reduced_axes:
        if op.type == "Mean" and op.outputs[0].dtype.is_integer:  # and rounded
            return STATISTIC
        if op.type == "Mean" and value.some is not None and not value.power:
            # A mean of the remaining rows is their sum divided by their number.
            return Value(Kind.RATIO, 1, over=tensor)
        return powers.reduced(op.type, value)
    if value.power and op.type not in ("Sum", "Mean", "Max", "Min"):
        return UNKNOWN
    if op.get_attr("keep_dims"):
        return value
    return value.replaced(
        axis=value.axis - sum(axis < value.axis for axis in reduced_axes)
    )


def _rank(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    return SAME


def _axes(tensor: tf.Tensor) -> list[int] | None:
    axes = tf.get_static_value(tensor)
    return None if axes is None else [int(axis) for axis in np.ravel(axes)]


def _all_axes(op: tf.Operation, axes: list[int] | None, rank: int | None) -> bool:
    """Whether a reduction covers all axes, even if their number is unknown."""
    if axes is not None and rank is not None:
        return len({axis % rank for axis in axes}) == rank
    source = op.inputs[1].op
    return source.type == "Range" and op.outputs[0].shape.rank == 0


def _halved_squares(
    own: Rows, op: tf.Operation, k: int, values: Sequence[Value]
) -> Value:
    value = values[0]
    return powers.reduced("Sum", value.replaced(power=2 * value.power))


def _bias(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    return powers.reduced("Sum", values[0]) if values[0].axis == 0 else UNKNOWN


# --- Along axes -----------------------------------------------------------------------


def _first_axis(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Ops on batches whose other operands are the same for all examples."""
    rows = [value for value in values if value.kind is Kind.ROWS]
    if any(v.axis for v in rows) or len({(v.order, v.some) for v in rows}) > 1:
        return UNKNOWN
    if any(not kinds.is_same(v) for v in values if v.kind is not Kind.ROWS):
        return UNKNOWN
    is_linear = op.type in _LINEAR and values[0].kind is Kind.ROWS
    if any(v.power for v in rows) and not (is_linear and len(rows) == 1):
        if not op.type.endswith("Grad") or any(v.power for v in values[:-1]):
            return UNKNOWN
        return values[-1].replaced(by_value=True)
    return rows[0].replaced(by_value=True)


_LINEAR = ("Conv2D", "Conv3D", "DepthwiseConv2dNative", "AvgPool", "AvgPool3D")


def _last_axes(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    count = tables.LAST_AXES[op.type]
    rows = [v for v in values if v.kind is Kind.ROWS]
    for tensor, v in zip(op.inputs, values, strict=True):
        rank = tensor.shape.rank
        if v.kind is Kind.ROWS and (rank is None or v.axis >= rank - count):
            return UNKNOWN
        if v.kind is not Kind.ROWS and not kinds.is_same(v):
            return UNKNOWN
    if len({(v.axis, v.order, v.some) for v in rows}) > 1 or any(v.power for v in rows):
        return UNKNOWN
    return rows[0].replaced(by_value=True)


def _along(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Ops along axes other than that of the examples."""
    value, rank = values[0], op.inputs[0].shape.rank
    axes = _axes(op.inputs[-1])
    if value.kind is not Kind.ROWS or rank is None or axes is None:
        return UNKNOWN
    if not all(map(kinds.is_same, values[1:])):
        return UNKNOWN
    if value.axis in [axis % rank for axis in axes]:
        return UNKNOWN
    if op.type in tables.CHOSEN:
        below = sum(axis % rank < value.axis for axis in axes)
        return value.replaced(axis=value.axis - below, power=0)
    is_linear = op.type in ("Cumsum", "ReverseV2", "Roll")
    return value if is_linear or not value.power else UNKNOWN


def _normalized(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value = values[0]
    if value.kind is not Kind.ROWS or value.axis or value.power:
        return UNKNOWN
    if not all(map(kinds.is_same, values[1:])):
        return UNKNOWN
    training = bool(op.get_attr("is_training"))
    if k == 0:
        return value.replaced(mixed=op) if training else value
    if not training:
        return SAME
    # Moving means and variances get the mean over the replicas.
    return Value(Kind.MEAN, mixed=op)


def _parsed(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Parses strings that hold an example each."""
    rank, value = op.outputs[k].shape.rank, values[0]
    dense = op.type == "DecodeCSV" or k >= 3 * len(op.get_attr("sparse_types"))
    if value.kind is Kind.ROWS and not value.axis and rank and dense:
        return value if op.type in ("ParseExampleV2", "DecodeCSV") else UNKNOWN
    return UNKNOWN


# --- By shapes ------------------------------------------------------------------------


def _filled(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Fills a shape: the result has a row per example if the shape grows with them."""
    place = tables.SHAPED[op.type]
    elements = own.sizes.elements(op.inputs[place])
    axis, is_known = grown(elements)
    if elements is None or not is_known:
        return UNKNOWN
    is_drawn = op.type not in ("Fill", "BroadcastTo", "Empty")
    if axis is None:
        others = [v for n, v in enumerate(values) if n != place]
        return kinds.DRAWN if is_drawn else others[0] if others else SAME
    if op.type == "BroadcastTo":
        return shaping.broadcast(op, values[0], axis, sizes.each(elements[axis]))
    rows = Value(Kind.ROWS, axis=axis, each=sizes.each(elements[axis]))
    filling = values[1 if op.type == "Fill" else 0]
    if op.type == "Fill" and not kinds.is_same(filling):
        if filling.kind is not Kind.SAME:
            return UNKNOWN
        return rows.replaced(power=filling.power, by_value=False)
    return rows.replaced(by_value=is_drawn)


def _believed(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    return believed(op.outputs[k], values)


def believed(tensor: tf.Tensor, values: Sequence[Value]) -> Value:
    """Returns the Value of a Python function: a row per example if shapes allow that.

    Args:
        tensor: The result, with the shape that the user declares.
        values: The Values of the function's arguments.
    """
    shape = tensor.shape
    rows = [v for v in values if v.kind is Kind.ROWS]
    if not shape.rank or shapes.sizes(tensor)[0] is not None or not rows:
        return UNKNOWN
    if any(v.axis or v.power or v.order or v.some is not None for v in rows):
        return UNKNOWN
    return Value(Kind.ROWS, each=kinds.each(rows))


_RULES: dict[str, Any] = {
    **dict.fromkeys(tables.ELEMENTWISE, _elementwise),
    **dict.fromkeys(tables.QUANTIZED, _quantized),
    **dict.fromkeys(tables.REPLACED, _replaced),
    **dict.fromkeys(tables.PASSED_ON, _passed),
    **dict.fromkeys(tables.REDUCED, _reduced),
    **{"Rank": _rank, "L2Loss": _halved_squares, "BiasAddGrad": _bias},
    **dict.fromkeys(tables.FIRST_AXIS, _first_axis),
    **dict.fromkeys(tables.LAST_AXES, _last_axes),
    **dict.fromkeys((*tables.ALONG, *tables.CHOSEN), _along),
    **dict.fromkeys(tables.NORMALIZED, _normalized),
    **{"ParseExampleV2": _parsed, "DecodeCSV": _parsed},
    **products.RULES,
    **dict.fromkeys(tables.SHAPED, _filled),
    **dict.fromkeys(tables.BELIEVED, _believed),
    **shaping.RULES,
    **lookups.RULES,
}
