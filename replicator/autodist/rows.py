# SPDX-License-Identifier: Apache-2.0
"""What ops make of tensors that have rows of examples.

Along one axis of such a tensor are the examples. An op keeps them apart, or reduces
them, or does neither: then nothing is known of what it makes, and losses of that are
refused. So each op is looked at by what it does to that axis; tables.py has the types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator.autodist import kinds, lookups, powers, products, shaping, tables
from replicator.autodist.kinds import SAME, STATISTIC, UNKNOWN, Kind, Value
from replicator.autodist.sizes import Sizes, grown
from replicator.autodist.wholes import Whole
from replicator.graph.ir import shapes

Rule = Callable[["Rows", tf.Operation, int, Sequence[Value]], Value]


class Rows:
    """Finds what ops make of rows.

    Args:
        sizes: Finds what shapes are.
        is_data: Says of an operand of an op whether it may be that of the whole batch.
    """

    def __init__(
        self, sizes: Sizes, is_data: Callable[[tf.Operation, int], bool]
    ) -> None:
        self.sizes, self.is_data = sizes, is_data

    def find(self, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
        """Returns what an op's k-th result is, given what its inputs are.

        Some of them have rows, or are places of such.
        """
        rule = _RULES.get(op.type)
        if rule is None:
            return UNKNOWN
        own = kinds.alone(values)
        made = self._put_together(op, own)
        own = [SAME if Whole(op, n) in made else v for n, v in enumerate(own)]
        if any(value.kind is Kind.UNKNOWN for value in own):
            return UNKNOWN
        found = rule(self, op, k, own)
        return kinds.made_of(found, [*values, SAME.replaced(wholes=made)])

    def _put_together(
        self, op: tf.Operation, values: Sequence[Value]
    ) -> frozenset[Whole]:
        """Returns what rows are combined with that can be of the whole batch."""
        if op.type not in tables.ELEMENTWISE and op.type not in _COMBINING:
            return frozenset()
        return frozenset(
            Whole(op, n)
            for n, value in enumerate(values)
            if value.kind not in (Kind.SAME, Kind.ROWS, Kind.DRAWN, Kind.PLACES)
            and self.is_data(op, n)
        )


# Besides those that act element by element.
_COMBINING = ("GatherV2", "MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum")


def _passed(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    (value, *_) = values
    if op.type == "Cast" and value.power:
        if op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating:
            return UNKNOWN
    return value


# --- Element by element ---------------------------------------------------------------


def _elementwise(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Rows are combined with rows that lie as they do, and what has none with each."""
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
    made = rows[0].replaced(power=power, by_value=by_value, mixed=None)
    rank = op.outputs[k].shape.rank
    first = next(n for n, v in enumerate(values) if v.kind is Kind.ROWS)
    before = op.inputs[first].shape.rank
    if rank is not None and before is not None:
        made = made.replaced(axis=made.axis + rank - before)
    if any(v.kind not in (Kind.SAME, Kind.DRAWN) for v in others):
        return made.replaced(mixed=op)
    return made


def _quantized(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Elements, rounded between bounds: if not given, the bounds are of all of them."""
    return _elementwise(own, op, k, values) if op.get_attr("range_given") else UNKNOWN


def _selected(values: Sequence[Value]) -> Value:
    """What is chosen by a vector with an element for each row, as in TensorFlow 1."""
    chosen = [v.replaced(by_value=True, mixed=None) for v in values]
    test, one, two = chosen
    if (
        test.kind is not Kind.ROWS
        or test.power
        or test.replaced(power=one.power) != one
    ):
        return UNKNOWN
    return one if one == two else UNKNOWN


def aligned(op: tf.Operation, values: Sequence[Value]) -> list[Value] | None:
    """Returns the operands that have rows; None unless all operands fit together."""
    pairs = list(zip(op.inputs, values, strict=True))
    rows = [(tensor, v) for tensor, v in pairs if v.kind is Kind.ROWS]
    ranks = {tensor.shape.rank for tensor, _ in rows}
    if None in ranks:
        scalars = all(t.shape.rank == 0 for t, v in pairs if v.kind is not Kind.ROWS)
        if not scalars or len(rows) > 1:
            return None
        return [v for _, v in rows]
    places = {v.axis - (tensor.shape.rank or 0) for tensor, v in rows}
    if len(places) > 1 or len({(v.order, v.some) for _, v in rows}) > 1:
        return None
    (place,) = places
    for tensor, v in pairs:
        if v.kind is Kind.ROWS:
            continue
        rank = tensor.shape.rank
        if v.kind is Kind.PLACES or rank is None:
            return None
        if rank >= -place and shapes.sizes(tensor)[place] != 1:
            return None
    return [v for _, v in rows]


def _power(op: tf.Operation, values: Sequence[Value]) -> float | None:
    """Returns the power of what an element-wise op makes; None if it has none."""
    found = []
    for tensor, value in zip(op.inputs, values, strict=True):
        has = value.kind in (Kind.SAME, Kind.ROWS, Kind.DRAWN)
        if not has and not kinds.is_level(value):
            return None
        found.append(0 if not has else None if powers.is_zero(tensor) else value.power)
    return powers.power_of(op.type, found)


# --- Reductions -----------------------------------------------------------------------


def _reduced(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    value, tensor = values[0], op.inputs[0]
    axes, rank = _axes(op.inputs[1]), tensor.shape.rank
    if value.kind is not Kind.ROWS or not kinds.is_same(values[1]):
        return UNKNOWN
    every = _all_axes(op, axes, rank)
    if not every and (axes is None or rank is None):
        return UNKNOWN
    at = [axis % rank for axis in axes or () if rank]
    if every or value.axis in at:
        if op.type == "Mean" and op.outputs[0].dtype.is_integer:  # which is rounded
            return STATISTIC
        if op.type == "Mean" and value.some is not None and not value.power:
            # Of rows that are left, it is their sum divided by how many there are.
            return Value(Kind.RATIO, 1, over=tensor)
        return powers.reduced(op.type, value)
    if value.power and op.type not in ("Sum", "Mean", "Max", "Min"):
        return UNKNOWN
    if op.get_attr("keep_dims"):
        return value
    return value.replaced(axis=value.axis - sum(axis < value.axis for axis in at))


def _axes(tensor: tf.Tensor) -> list[int] | None:
    axes = tf.get_static_value(tensor)
    return None if axes is None else [int(axis) for axis in np.ravel(axes)]


def _all_axes(op: tf.Operation, axes: list[int] | None, rank: int | None) -> bool:
    """Whether a reduction is of all axes, however many there are."""
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
    """Ops on batches, whose other operands are the same for all."""
    rows = [value for value in values if value.kind is Kind.ROWS]
    if any(v.axis for v in rows) or len({(v.order, v.some) for v in rows}) > 1:
        return UNKNOWN
    if any(not kinds.is_same(v) for v in values if v.kind is not Kind.ROWS):
        return UNKNOWN
    linear = op.type in _LINEAR and values[0].kind is Kind.ROWS
    if any(v.power for v in rows) and not (linear and len(rows) == 1):
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
    """Ops along axes that do not have the examples."""
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
    linear = op.type in ("Cumsum", "ReverseV2", "Roll")
    return value if linear or not value.power else UNKNOWN


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
    # Of means and variances, the means over the replicas are kept.
    return Value(Kind.MEAN, mixed=op)


def _parsed(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Texts with an example each, of which each is parsed by itself."""
    rank, value = op.outputs[k].shape.rank, values[0]
    dense = op.type == "DecodeCSV" or k >= 3 * len(op.get_attr("sparse_types"))
    if value.kind is Kind.ROWS and not value.axis and rank and dense:
        return value if op.type in ("ParseExampleV2", "DecodeCSV") else UNKNOWN
    return UNKNOWN


# --- By shapes ------------------------------------------------------------------------


def _filled(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """What is as large as a shape says, a row for each example if that does."""
    place = tables.SHAPED[op.type]
    axis, known = grown(own.sizes.elements(op.inputs[place]))
    if not known:
        return UNKNOWN
    drawn = op.type not in ("Fill", "BroadcastTo", "Empty")
    if axis is None:
        others = [v for n, v in enumerate(values) if n != place]
        return kinds.DRAWN if drawn else others[0] if others else SAME
    if op.type == "BroadcastTo":
        return shaping.broadcast(op, values[0], axis)
    filling = values[1 if op.type == "Fill" else 0]
    if op.type == "Fill" and not kinds.is_same(filling):
        if filling.kind is not Kind.SAME:
            return UNKNOWN
        return Value(Kind.ROWS, filling.power, axis=axis, by_value=False)
    return Value(Kind.ROWS, axis=axis, by_value=drawn)


def _believed(own: Rows, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    return believed(op.outputs[k], values)


def believed(tensor: tf.Tensor, values: Sequence[Value]) -> Value:
    """Returns what Python computes: a row for each example if it may have that many.

    Args:
        tensor: What was computed, with the shape that the user says that it has.
        values: What is known of that of which it was computed.
    """
    shape = tensor.shape
    rows = [v for v in values if v.kind is Kind.ROWS]
    if not shape.rank or shapes.sizes(tensor)[0] is not None or not rows:
        return UNKNOWN
    if any(v.axis or v.power or v.order or v.some is not None for v in rows):
        return UNKNOWN
    return Value(Kind.ROWS)


_RULES: dict[str, Any] = {
    **dict.fromkeys(tables.ELEMENTWISE, _elementwise),
    **dict.fromkeys(tables.QUANTIZED, _quantized),
    **dict.fromkeys(tables.PASSED_ON, _passed),
    **dict.fromkeys(tables.REDUCED, _reduced),
    **{"L2Loss": _halved_squares, "BiasAddGrad": _bias},
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
