# SPDX-License-Identifier: Apache-2.0
"""Finds sums of matrix products, which can be made from the products' thin factors.

The gradient of a dense layer's weights is x^T dy, with one row per example in x and in
dy. The sum of the replicas' products is the product of their joined rows: for 64 rows
and 2048 x 2048 weights, 1 MiB moves per replica in place of 16, and nothing passes over
the large matrices once more. What a layer adds, its bias, has the sum of the rows of dy
as its gradient; where dy moves anyway, that is summed from the joined rows too.

Reads facts and changes no graph; primitives/sufficient.py puts the sums together.

Source: sufficient factor broadcasting, Xie et al. 2015, arXiv:1512.06216; Poseidon,
Zhang et al. 2017, arXiv:1706.03292.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import shapes

_UNKNOWN_EXAMPLES = 64  # a batch whose size is only known when the step runs
# The types of ops through which operands are traced back to the product.
TAKEN_APART = {
    *("MatMul", "BiasAddGrad", "Sum"),
    *("Cast", "Identity", "Mul", "RealDiv", "Reshape", "Transpose"),
}
_FLOATING = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


@dataclasses.dataclass(frozen=True)
class Factor:
    """One side of a matrix product: a matrix with the rows that are summed over.

    Attributes:
        tensor: Of rank 2, or more in `RowSum`.
        axis: Along which the rows stand, 0 or 1.
    """

    tensor: tf.Tensor
    axis: int

    @property
    def width(self) -> int:
        """The size of each row, which is known."""
        width = shapes.sizes(self.tensor)[1 - self.axis]
        assert width is not None, self
        return width

    @property
    def rows(self) -> int:
        """The number of rows, or a guess where the number of examples is unknown."""
        known = shapes.sizes(self.tensor)[self.axis]
        if known is not None:
            return known
        shape = shapes.sizes(origin(self.tensor)) if self.axis == 0 else ()
        return _UNKNOWN_EXAMPLES * math.prod(size or 1 for size in shape[1:-1])


@dataclasses.dataclass(frozen=True)
class After:
    """What is done to a product before it is reduced.

    Attributes:
        scales: ("Mul" or "RealDiv", scalar), the last one first.
        steps: ("Transpose", permutation) or ("Reshape", shape), the last one first.
        dtype: What it is cast to.
    """

    scales: tuple[tuple[str, tf.Tensor], ...]
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: tf.DType


@dataclasses.dataclass(frozen=True)
class Product:
    """One replica's operand: a matrix product, and what is done to it.

    Attributes:
        left: [rows, m], or [m, rows].
        right: [rows, n], or [n, rows].
        after: What is done to the [m, n] that they make.
    """

    left: Factor
    right: Factor
    after: After

    @property
    def form(self) -> Any:
        """What must be alike for products to be summed by their factors."""
        sides = [(f.tensor.dtype, f.axis, f.width) for f in (self.left, self.right)]
        return (*sides, self.after.steps)


@dataclasses.dataclass(frozen=True)
class RowSum:
    """One replica's operand: the sum of all rows of a tensor, and what is done to it.

    Attributes:
        rows: [..., n].
        after: What is done to the [n] that it makes.
    """

    rows: tf.Tensor
    after: After

    @property
    def form(self) -> Any:
        """What must be alike for them to be summed by their joined rows."""
        return (self.rows.dtype, shapes.sizes(self.rows)[-1], self.after.steps)


class Facts(NamedTuple):
    """What is told of an operand that is moved by its factors.

    Attributes:
        form: What must be alike on all replicas.
        known: The number of rows; None where it is only known when the step runs.
        rows: The same, or a guess. 0 for a sum of rows, which move anyway.
        widths: Those of both factors.
        size: Bytes of a number.
        of: For a sum of rows: the place of the product with which they move.
    """

    form: str
    known: int | None = None
    rows: int = 0
    widths: tuple[int, int] = (0, 0)
    size: int = 0
    of: int | None = None

    def alike(self, other: Facts) -> bool:
        """Whether both replicas' operands can be moved alike."""
        return (self.form, self.of) == (other.form, other.of)


def find(column: Sequence[tf.Tensor]) -> list[Any] | None:
    """Splits what all replicas pass into its factors, if it is alike.

    Args:
        column: One tensor per replica, that only the communication reads.

    Returns:
        One Product per replica, or one RowSum; None for anything else, and for what is
        read elsewhere too, and so is made anyway.
    """
    found = [_split_product(tensor) for tensor in column]
    for one in (Product, RowSum):
        if all(isinstance(own, one) for own in found):
            if len({own.form for own in found if own is not None}) == 1:
                return found
    return None


def facts(operands: Sequence[tf.Tensor]) -> dict[int, Facts]:
    """Returns what other processes have to know of the factors of one replica.

    Args:
        operands: What it passes to a communication.

    Returns:
        By their places, of those operands that are products; and of those that are sums
        of rows which move with one of the products anyway.
    """
    found = {k: _split_product(tensor) for k, tensor in enumerate(operands)}
    told: dict[int, Facts] = {}
    sides: dict[tuple[int, int], int] = {}
    for k, own in found.items():
        if isinstance(own, Product):
            count = shapes.sizes(own.left.tensor)[own.left.axis]
            widths = (own.left.width, own.right.width)
            size = own.left.tensor.dtype.size
            told[k] = Facts(_shown(own), count, own.left.rows, widths, size)
            for side in (own.left, own.right):
                rows = origin(side.tensor) if side.axis == 0 else side.tensor
                sides[id(rows), side.axis] = k
    for k, own in found.items():
        if isinstance(own, RowSum) and (id(origin(own.rows)), 0) in sides:
            told[k] = Facts(_shown(own), of=sides[id(origin(own.rows)), 0])
    return told


def _shown(own: Product | RowSum) -> str:
    scales = [kind for kind, _ in own.after.scales]
    return repr((type(own).__name__, own.form, scales))


def origin(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that holds the same rows, maybe under another shape."""
    while True:
        if tensor.op.type not in ("Identity", "Reshape"):
            return tensor
        before = tensor.op.inputs[0]
        if tensor.op.type != "Identity" and not _same_rows(before, tensor):
            return tensor
        tensor = before


def _same_rows(before: tf.Tensor, tensor: tf.Tensor) -> bool:
    """Whether a tensor of another shape has the same last size, which is known."""
    old, new = shapes.static(before), shapes.static(tensor)
    if not old or not new or len(old) < 2 or old[-1] is None:
        return False
    return old[-1] == new[-1]


def _split_product(tensor: tf.Tensor) -> Product | RowSum | None:
    """Goes back from an operand to the product that it is made of."""
    dtype = tensor.dtype
    if dtype not in _FLOATING:
        return None
    scales: list[tuple[str, tf.Tensor]] = []
    steps: list[tuple[str, tuple[int, ...]]] = []
    while len(tensor.consumers()) == 1 and not _tf.control_outputs(tensor.op):
        op = tensor.op
        inputs = list(op.inputs)
        after = After(tuple(scales), tuple(steps), dtype)
        if op.type == "MatMul":
            return _product(op, after)
        if op.type in ("BiasAddGrad", "Sum"):
            return _row_sum(op, after)
        if op.type == "Cast" and inputs[0].dtype in _FLOATING:
            if inputs[0].dtype.size >= tensor.dtype.size:
                return None  # the user wants it rounded
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


def _product(op: tf.Operation, after: After) -> Product | None:
    left, right = op.inputs
    if left.dtype != right.dtype or left.dtype not in _FLOATING:
        return None
    one = Factor(left, 0 if op.get_attr("transpose_a") else 1)
    other = Factor(right, 1 if op.get_attr("transpose_b") else 0)
    if left.shape.rank != 2 or right.shape.rank != 2:
        return None
    widths = shapes.sizes(left)[1 - one.axis], shapes.sizes(right)[1 - other.axis]
    if None in widths:
        return None
    return Product(one, other, after)


def _row_sum(op: tf.Operation, after: After) -> RowSum | None:
    rows = op.inputs[0]
    known = shapes.static(rows)
    if known is None or len(known) < 2 or known[-1] is None:
        return None
    if rows.dtype not in _FLOATING:
        return None
    if op.type == "Sum":
        axes = tf.get_static_value(op.inputs[1])
        rank = len(known)
        if axes is None or op.get_attr("keep_dims"):
            return None
        if {int(axis) % rank for axis in axes.flatten()} != set(range(rank - 1)):
            return None
    elif op.get_attr("data_format") != b"NHWC":
        return None
    return RowSum(rows, after)
