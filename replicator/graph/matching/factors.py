# SPDX-License-Identifier: Apache-2.0
"""Finds reduced matrix products that can be computed from the products' thin factors.

The gradient of a dense layer's weights is x^T dy, with one row per example in x and in
dy. The sum of the replicas' products is the product of their concatenated rows: for 64
rows and 2048 x 2048 weights, each replica moves 1 MiB instead of 16, and no further
pass over the large matrices is needed. The gradient of the layer's bias is the sum of
the rows of dy; where dy moves anyway, it too is summed from the concatenated rows.

Reads facts and changes no graph; primitives/sufficient.py builds the sums.

Source: sufficient factor broadcasting, Xie et al. 2015, arXiv:1512.06216; Poseidon,
Zhang et al. 2017, arXiv:1706.03292.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replicator._tf import ops
from replicator.graph.ir import shapes

_UNKNOWN_EXAMPLES = 64  # assumed batch size where it is only known when the step runs
# The ops between an operand and its factors, including the product or the sum itself.
TRACED_OPS = frozenset(
    "BiasAddGrad Cast Identity MatMul Mul RealDiv Reshape Sum Transpose".split()
)
_HALF = (tf.float16, tf.bfloat16)
_FLOATING = (*_HALF, tf.float32, tf.float64)


@dataclasses.dataclass(frozen=True)
class Factor:
    """One side of a matrix product, whose rows are summed over.

    Attributes:
        tensor: A matrix; in a `RowSum`, of rank 2 or more.
        axis: The axis that indexes the rows, 0 or 1.
    """

    tensor: tf.Tensor
    axis: int

    @property
    def width(self) -> int:
        """The size of each row, always static."""
        width = shapes.sizes(self.tensor)[1 - self.axis]
        assert width is not None, self
        return width

    @property
    def rows(self) -> int:
        """The number of rows, estimated where the number of examples is unknown."""
        static_rows = shapes.sizes(self.tensor)[self.axis]
        if static_rows is not None:
            return static_rows
        shape = shapes.sizes(origin(self.tensor)) if self.axis == 0 else ()
        return _UNKNOWN_EXAMPLES * math.prod(size or 1 for size in shape[1:-1])


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The ops between a product and its reduction.

    Attributes:
        scales: ("Mul" or "RealDiv", scalar), the last one first.
        steps: ("Transpose", permutation) or ("Reshape", shape), the last one first.
        dtype: The dtype of the result.
    """

    scales: tuple[tuple[str, tf.Tensor], ...]
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: tf.DType


@dataclasses.dataclass(frozen=True)
class Product:
    """One replica's operand, as a matrix product and the ops after it.

    Attributes:
        left: [rows, m] or [m, rows].
        right: [rows, n] or [n, rows].
        epilogue: What is applied to their product, [m, n].
    """

    left: Factor
    right: Factor
    epilogue: Epilogue

    @property
    def form(self) -> Any:
        """What must agree for products to be summed by their factors."""
        sides = [(f.tensor.dtype, f.axis, f.width) for f in (self.left, self.right)]
        return (*sides, self.epilogue.steps)


@dataclasses.dataclass(frozen=True)
class RowSum:
    """One replica's operand, as the sum of a tensor's rows and the ops after it.

    Attributes:
        rows: [..., n].
        epilogue: What is applied to the sum, [n].
    """

    rows: tf.Tensor
    epilogue: Epilogue

    @property
    def form(self) -> Any:
        """What must agree for row sums to be computed from concatenated rows."""
        return (self.rows.dtype, shapes.sizes(self.rows)[-1], self.epilogue.steps)


class FactorReport(NamedTuple):
    """What a process reports of an operand that can be reduced by its factors.

    Attributes:
        form: What must agree on all replicas.
        static_rows: The number of rows; None if it is only known when the step runs.
        rows: The number of rows, estimated where unknown; 0 for a row sum, whose rows
            move anyway.
        widths: The row widths of both factors.
        size: Bytes per element.
        of: For a row sum, the index of the product whose rows it shares.
    """

    form: str
    static_rows: int | None = None
    rows: int = 0
    widths: tuple[int, int] = (0, 0)
    size: int = 0
    of: int | None = None

    def alike(self, other: FactorReport) -> bool:
        """Whether the operands of two replicas can be reduced by their factors."""
        return (self.form, self.of) == (other.form, other.of)


def find(column: Sequence[tf.Tensor]) -> list[Any] | None:
    """Splits the replicas' operands into factors, if all have the same form.

    Args:
        column: One tensor per replica, read by the communication alone.

    Returns:
        One Product per replica, or one RowSum per replica; None for anything else,
        including values that are also read elsewhere and so must be computed anyway.
    """
    operands = [_split_product(tensor) for tensor in column]
    for kind in (Product, RowSum):
        if all(isinstance(operand, kind) for operand in operands):
            if len({operand.form for operand in operands if operand is not None}) == 1:
                return operands
    return None


def reports(operands: Sequence[tf.Tensor]) -> dict[int, FactorReport]:
    """Returns what other processes must know of one replica's factors.

    Args:
        operands: The replica's operands of one communication.

    Returns:
        Reports by operand index: of products, and of row sums whose rows move with one
        of these products anyway.
    """
    candidates = {k: _split_product(tensor) for k, tensor in enumerate(operands)}
    reported: dict[int, FactorReport] = {}
    sides: dict[tuple[int, int], int] = {}
    for k, operand in candidates.items():
        if isinstance(operand, Product):
            count = shapes.sizes(operand.left.tensor)[operand.left.axis]
            widths = (operand.left.width, operand.right.width)
            size = operand.left.tensor.dtype.size
            reported[k] = FactorReport(
                _form_text(operand), count, operand.left.rows, widths, size
            )
            for side in (operand.left, operand.right):
                rows = origin(side.tensor) if side.axis == 0 else side.tensor
                sides[id(rows), side.axis] = k
    for k, operand in candidates.items():
        if isinstance(operand, RowSum) and (id(origin(operand.rows)), 0) in sides:
            reported[k] = FactorReport(
                _form_text(operand), of=sides[id(origin(operand.rows)), 0]
            )
    return reported


def _form_text(operand: Product | RowSum) -> str:
    scales = [kind for kind, _ in operand.epilogue.scales]
    return repr((type(operand).__name__, operand.form, scales))


def origin(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that holds the same rows before any reshapes."""
    while True:
        if tensor.op.type not in ("Identity", "Reshape"):
            return tensor
        before = tensor.op.inputs[0]
        if tensor.op.type != "Identity" and not _same_rows(before, tensor):
            return tensor
        tensor = before


def _same_rows(before: tf.Tensor, tensor: tf.Tensor) -> bool:
    """Whether a reshape keeps the last dimension, of known size."""
    old, new = shapes.static(before), shapes.static(tensor)
    if not old or not new or len(old) < 2 or old[-1] is None:
        return False
    return old[-1] == new[-1]


def _split_product(tensor: tf.Tensor) -> Product | RowSum | None:
    """Traces an operand back to the matrix product or row sum it is computed from."""
    dtype = tensor.dtype
    if dtype not in _FLOATING:
        return None
    scales: list[tuple[str, tf.Tensor]] = []
    steps: list[tuple[str, tuple[int, ...]]] = []
    while len(tensor.consumers()) == 1 and not ops.control_outputs(tensor.op):
        op = tensor.op
        inputs = list(op.inputs)
        epilogue = Epilogue(tuple(scales), tuple(steps), dtype)
        if op.type == "MatMul":
            return _product(op, epilogue)
        if op.type in ("BiasAddGrad", "Sum"):
            return _row_sum(op, epilogue)
        if op.type == "Cast":
            # Products are computed in float32 at least. A narrower dtype would need
            # rounding; a wider one, sums in that dtype.
            if inputs[0].dtype not in _HALF or tensor.dtype != tf.float32:
                return None
        elif op.type in ("Mul", "RealDiv") and inputs[1].shape.rank == 0:
            scales.append((op.type, inputs[1]))
        elif op.type == "Mul" and inputs[0].shape.rank == 0:
            scales.append((op.type, inputs[0]))
            inputs = inputs[1:]
        elif op.type == "Transpose":
            permutation = tf.get_static_value(inputs[1])
            if permutation is None:
                return None
            steps.append((op.type, tuple(map(int, permutation))))
        elif op.type == "Reshape" and tensor.shape.is_fully_defined():
            steps.append((op.type, shapes.defined(tensor)))
        elif op.type != "Identity":
            return None
        tensor = inputs[0]
    return None


def _product(op: tf.Operation, epilogue: Epilogue) -> Product | None:
    left, right = op.inputs
    if left.dtype != right.dtype or left.dtype not in _FLOATING:
        return None
    left_factor = Factor(left, 0 if op.get_attr("transpose_a") else 1)
    right_factor = Factor(right, 1 if op.get_attr("transpose_b") else 0)
    if left.shape.rank != 2 or right.shape.rank != 2:
        return None
    widths = (
        shapes.sizes(left)[1 - left_factor.axis],
        shapes.sizes(right)[1 - right_factor.axis],
    )
    if None in widths:
        return None
    return Product(left_factor, right_factor, epilogue)


def _row_sum(op: tf.Operation, epilogue: Epilogue) -> RowSum | None:
    rows = op.inputs[0]
    shape = shapes.static(rows)
    if shape is None or len(shape) < 2 or shape[-1] is None:
        return None
    if rows.dtype not in _FLOATING:
        return None
    if op.type == "Sum":
        axes = tf.get_static_value(op.inputs[1])
        rank = len(shape)
        if axes is None or op.get_attr("keep_dims"):
            return None
        if {int(axis) % rank for axis in axes.flatten()} != set(range(rank - 1)):
            return None
    elif op.get_attr("data_format") != b"NHWC":
        return None
    return RowSum(rows, epilogue)
