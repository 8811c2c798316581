"""What becomes of a value when the examples are split over replicas.

A mean over the examples of all replicas is the mean of the replicas' own, weighed by
their examples; a sum is the sum; a maximum the maximum. Which of these a value without
a batch axis is, follows from the ops that compute it. Pure functions of a graph.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from replicator.autodist.program import ELEMENTS, Program
from replicator.graph.ir import shapes


class Kind(enum.Enum):
    """How a value of the whole batch follows from those of its parts."""

    SAME = "the same on all replicas"
    ROWS = "one row or more for each example"
    MEAN = "a mean over the examples"
    SUM = "a sum over the examples"
    COUNT = "a number of examples, or of what each has as many of"
    MAX = "a maximum"
    MIN = "a minimum"
    RATIO = "a ratio of two sums over the examples"
    MIXED = "a sum over the examples and something else"
    UNKNOWN = "unknown"


_REDUCED = {
    "Mean": Kind.MEAN,
    "Sum": Kind.SUM,
    "Max": Kind.MAX,
    "Min": Kind.MIN,
    "All": Kind.MIN,
    "Any": Kind.MAX,
    "L2Loss": Kind.SUM,
}
_UNARY = (
    *("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Neg", "StopGradient"),
    *("CheckNumerics", "EnsureShape", "Snapshot", "PreventGradient"),
)
_ADDED = ("Add", "AddV2", "AddN", "Sub")
_SCALED = ("Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan")
_LINEAR = (Kind.SAME, Kind.MEAN, Kind.SUM, Kind.COUNT)
_SUMS = (Kind.SUM, Kind.COUNT)
# Their rows are not those of examples, however many there are.
_ROWS_OF_OTHERS = (
    *("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"),
    *("Where", "ListDiff", "Range"),
)
_DEEPEST = 200  # ops between a value and what it is reduced from


class Kinds:
    """Finds the kinds of tensors of a program.

    Args:
        program: The single-device graph.
    """

    def __init__(self, program: Program) -> None:
        self._differing = program.differing()
        self._by_value = program.differing(by_shape=False)
        self._known: dict[int, tuple[tf.Tensor, Kind]] = {}
        self._batches = {
            shapes.sizes(tensor)[0]
            for op in program.graph.get_operations()
            if ELEMENTS.fullmatch(op.type)
            for tensor in op.outputs
            if tensor.shape.rank and shapes.sizes(tensor)[0] is not None
        }

    def of(self, tensor: tf.Tensor, depth: int = 0) -> Kind:
        """Returns the kind of a tensor."""
        known = self._known.get(id(tensor))
        if known is None:
            kind = Kind.UNKNOWN if depth > _DEEPEST else self._find(tensor, depth + 1)
            known = self._known[id(tensor)] = tensor, kind
        return known[1]

    def _find(self, tensor: tf.Tensor, depth: int) -> Kind:
        op = tensor.op
        if op not in self._differing:
            return Kind.SAME
        if self.has_rows(tensor):
            return Kind.ROWS
        if op.type in _REDUCED:
            return self._reduced(op, depth)
        if op.type in ("Size", "StridedSlice"):
            return self._size(op)
        kinds = [self.of(one, depth) for one in op.inputs]
        if op.type in _UNARY:
            return _unary(op, kinds[0])
        if op.type in _ADDED:
            return _added(op, kinds)
        if op.type in _SCALED:
            return _scaled(op.type, kinds)
        if op.type in ("Select", "SelectV2") and kinds[0] is Kind.SAME:
            return kinds[1] if kinds[1] is kinds[2] else Kind.UNKNOWN
        return Kind.UNKNOWN

    def has_rows(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor that differs is taken to have a row for each example."""
        shape = tensor.shape
        if not shape.rank or tensor.op.type in _ROWS_OF_OTHERS:
            return False
        return shape[0] is None or shape[0] in self._batches

    def _reduced(self, op: tf.Operation, depth: int) -> Kind:
        """Returns the kind of what a reduction makes of its input."""
        (value, *axes) = op.inputs
        kind = self.of(value, depth)
        made = _REDUCED[op.type]
        if kind is Kind.ROWS:
            axis = tf.get_static_value(axes[0]) if axes else 0
            rank = value.shape.rank
            first = rank is None or axis is None or not axes
            first = first or bool(np.isin(np.ravel(axis), (0, -rank)).any())
            if not first:
                return Kind.UNKNOWN
            if made is Kind.SUM and value.op not in self._by_value:
                return Kind.COUNT
            return made
        if made in (Kind.MEAN, Kind.SUM) and kind in _LINEAR and op.type != "L2Loss":
            return kind
        return kind if kind is made and made in (Kind.MAX, Kind.MIN) else Kind.UNKNOWN

    def _size(self, op: tf.Operation) -> Kind:
        """Returns the kind of a number that is taken from a shape."""
        source = op.inputs[0]
        if op.type == "Size":
            return Kind.COUNT if self.has_rows(source) else Kind.UNKNOWN
        if source.op.type == "Cast":
            source = source.op.inputs[0]
        begin = tf.get_static_value(op.inputs[1])
        one = op.get_attr("shrink_axis_mask") == 1
        if source.op.type != "Shape" or begin is None or not one or len(begin) != 1:
            return Kind.UNKNOWN
        if not self.has_rows(source.op.inputs[0]):
            return Kind.UNKNOWN
        return Kind.COUNT if begin[0] == 0 else Kind.SAME


def _unary(op: tf.Operation, kind: Kind) -> Kind:
    if kind is Kind.ROWS:
        return Kind.UNKNOWN
    if op.type == "Neg":
        return _negated(kind)
    if op.type == "Cast" and kind not in (Kind.SAME, *_SUMS):
        rounded = op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating
        return Kind.UNKNOWN if rounded else kind
    return kind


def _added(op: tf.Operation, kinds: Sequence[Kind]) -> Kind:
    found = {
        kind
        for kind, tensor in zip(kinds, op.inputs, strict=True)
        if kind is not Kind.SAME or not _is_zero(tensor)
    }
    if not found <= set(_LINEAR):
        return _beside_the_same(op, kinds, found)
    sums = found & set(_SUMS)
    if not sums:
        return Kind.MEAN
    if found - sums:
        return Kind.MIXED
    return Kind.COUNT if found == {Kind.COUNT} else Kind.SUM


def _beside_the_same(op: tf.Operation, kinds: Sequence[Kind], found: set[Kind]) -> Kind:
    """Returns the kind of an extremum to which what is the same is added."""
    if Kind.MIXED in found:
        return Kind.MIXED
    (*others,) = found - {Kind.SAME}
    if len(others) > 1 or others[0] not in (Kind.MAX, Kind.MIN):
        return Kind.UNKNOWN
    if list(kinds).count(others[0]) > 1:
        return Kind.UNKNOWN
    negated = op.type == "Sub" and kinds[1] is others[0]
    return _negated(others[0]) if negated else others[0]


def _negated(kind: Kind) -> Kind:
    return {Kind.MAX: Kind.MIN, Kind.MIN: Kind.MAX}.get(kind, kind)


def _scaled(type_: str, kinds: Sequence[Kind]) -> Kind:
    one, two = kinds
    if two is Kind.SAME:
        return one if one in _LINEAR or one is Kind.RATIO else Kind.UNKNOWN
    if type_ in ("Mul", "MulNoNan"):
        if one is Kind.SAME:
            return two if two in _LINEAR or two is Kind.RATIO else Kind.UNKNOWN
        pair = {one, two}
        return Kind.SUM if pair == {Kind.MEAN, Kind.COUNT} else Kind.UNKNOWN
    if one in _SUMS and two is Kind.COUNT:
        return Kind.MEAN
    if one in _SUMS and two is Kind.SUM:
        return Kind.RATIO
    return Kind.UNKNOWN


def _is_zero(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and bool(np.all(np.equal(value, 0)))
