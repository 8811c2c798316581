# SPDX-License-Identifier: Apache-2.0
"""Rules for matrix products and the like on rows of examples.

Each axis of an operand has a letter, as in an einsum: if the examples' letter is in the
result, it has rows; if it is summed over, they are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.autodist import kinds, powers
from replicator.autodist.kinds import UNKNOWN, Kind, Value
from replicator.graph.ir import shapes

Own = Any  # rows.Rows


def _product(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    """Assigns letters to the axes of a matrix product, as in an einsum."""
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return UNKNOWN
    names = (
        ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    )
    flip = [bool(op.get_attr(name)) for name in names]
    batch = "abcdefgh"
    parts = []
    for rank, own_flip, letters in zip(ranks, flip, ("xy", "yz"), strict=True):
        letters = letters[::-1] if own_flip else letters
        parts.append(batch[len(batch) - (rank - 2) :] + letters)
    longest = max(parts, key=len)[:-2]
    return _contracted(op, values, parts, longest + "xz")


def _einsum(own: Own, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
    equation = op.get_attr("equation").decode().replace(" ", "")
    operands, _, result = equation.partition("->")
    parts = operands.split(",")
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if "." in equation:
        if None in ranks:
            return UNKNOWN
        spare_letters = "ABCDEFGH"
        dot_counts = [
            rank - len(p.replace("...", ""))
            for rank, p in zip(ranks, parts, strict=True)
        ]
        parts = [
            p.replace("...", spare_letters[len(spare_letters) - n :] if n else "")
            for p, n in zip(parts, dot_counts, strict=True)
        ]
        most_dots = max(dot_counts)
        result = result.replace(
            "...", spare_letters[len(spare_letters) - most_dots :] if most_dots else ""
        )
    return _contracted(op, values, parts, result)


def _contracted(
    op: tf.Operation, values: Sequence[Value], parts: Sequence[str], result: str
) -> Value:
    """Returns a product's value: rows if the examples' letter stays, else a sum."""
    rows = [
        (part, v) for part, v in zip(parts, values, strict=True) if v.kind is Kind.ROWS
    ]
    letters = {part[v.axis] for part, v in rows}
    if len(letters) != 1 or len({(v.order, v.some) for _, v in rows}) > 1:
        return UNKNOWN
    (letter,) = letters
    power: float = 0
    mixed = None
    for tensor, part, value in zip(op.inputs, parts, values, strict=True):
        if value.kind not in (Kind.ROWS, Kind.SAME):
            if not kinds.is_level(value) and value.kind is not Kind.DRAWN:
                return UNKNOWN
            mixed = op if value.kind is not Kind.DRAWN else mixed
        elif not powers.is_zero(tensor):
            power += value.power
        if value.kind is not Kind.ROWS and letter in part:
            if shapes.sizes(tensor)[part.index(letter)] != 1 or letter not in result:
                return UNKNOWN
    by_value = mixed is not None or any(v.by_value for _, v in rows)
    product = rows[0][1].replaced(power=power, by_value=by_value, mixed=mixed)
    if letter in result:
        return product.replaced(axis=result.index(letter))
    return powers.reduced("Sum", product)


def _filter_gradient(
    own: Own, op: tf.Operation, k: int, values: Sequence[Value]
) -> Value:
    """The gradient of a convolution's filter: a sum over the examples."""
    inputs, gradient = values[0], values[2]
    if {inputs.kind, gradient.kind} != {Kind.ROWS} or inputs.axis or gradient.axis:
        return UNKNOWN
    if (inputs.order, inputs.some) != (gradient.order, gradient.some):
        return UNKNOWN
    return powers.reduced(
        "Sum", gradient.replaced(power=inputs.power + gradient.power, by_value=True)
    )


def _input_gradient(
    own: Own, op: tf.Operation, k: int, values: Sequence[Value]
) -> Value:
    """The gradient of a convolution's input; the op is given the input's shape."""
    value = values[2]
    if value.kind is not Kind.ROWS or value.axis or not kinds.is_same(values[1]):
        return UNKNOWN
    return value


def _average_gradient(
    own: Own, op: tf.Operation, k: int, values: Sequence[Value]
) -> Value:
    value = values[1]
    return value if value.kind is Kind.ROWS and not value.axis else UNKNOWN


RULES: dict[str, Any] = {
    **dict.fromkeys(
        ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _product
    ),
    "Einsum": _einsum,
    "Conv2DBackpropFilter": _filter_gradient,
    "DepthwiseConv2dNativeBackpropFilter": _filter_gradient,
    "Conv2DBackpropInput": _input_gradient,
    "DepthwiseConv2dNativeBackpropInput": _input_gradient,
    **{"AvgPoolGrad": _average_gradient, "AvgPool3DGrad": _average_gradient},
}
