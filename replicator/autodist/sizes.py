# SPDX-License-Identifier: Apache-2.0
"""Infers the elements of shapes: known sizes, and numbers of examples.

A shape is a short integer vector whose elements differ in nature: one may be a number
of examples while the others are fixed. So each element is inferred separately.
"""

from __future__ import annotations

import collections
import functools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from replicator.autodist import tables
from replicator.autodist.kinds import Kind, Power, Value
from replicator.graph.ir import shapes

# One element: a known size, or the exponent of the number of examples in it, with what
# else is known: how many times that number it is, or which of the other sizes.
Element: TypeAlias = "int | tuple[Power] | tuple[Power, Hashable] | None"
GROWS: Element = (1,)
FIXED: Element = (0,)
UNKNOWN_SIZE = "?"
_PASSED = ("Identity", "Cast", "StopGradient", "Snapshot", "EnsureShape")
_KEEP_SIZES = (*tables.ELEMENTWISE, *tables.PASSED_ON)
_MULTIPLY = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")


class Sizes:
    """Infers the elements of integer vectors and scalars.

    Args:
        of: Returns the Value of a tensor.
    """

    def __init__(self, of: Callable[[tf.Tensor], Value]) -> None:
        self._of = of

    def elements(self, tensor: tf.Tensor, depth: int = 0) -> list[Element] | None:
        """Returns the elements of a vector, or a scalar's only one; None if unknown."""
        static_value = tf.get_static_value(tensor)
        if static_value is not None:
            if not np.issubdtype(np.asarray(static_value).dtype, np.integer):
                return None
            return [int(size) for size in np.ravel(static_value)]
        rank = tensor.shape.rank
        if rank is None or rank > 1 or depth > 30:
            return None
        elements = self.computed(tensor, depth + 1)
        if elements is None:
            value = self._of(tensor)
            count = 1 if rank == 0 else shapes.sizes(tensor)[0]
            if value.kind is Kind.SAME and count is not None:
                if rank == 0 and value.power:
                    return [(value.power,)]
                if not value.power:
                    return [(0, (tensor.ref(), k)) for k in range(count)]
        return elements

    def computed(self, tensor: tf.Tensor, depth: int = 0) -> list[Element] | None:
        """Returns the elements of the result of an op on shapes; None for other ops."""
        op = tensor.op
        if op.type in ("Shape", "ShapeN"):
            return self.of_shape(op.inputs[tensor.value_index])
        if op.type == "Size":
            sizes = self.of_shape(op.inputs[0])
            one: Element = 1
            total = None if sizes is None else functools.reduce(_times, sizes, one)
            return None if total is None else [total]
        if op.type in _PASSED:
            return self.elements(op.inputs[0], depth)
        if op.type == "Reshape" and tensor.shape.rank == 1:
            return self.elements(op.inputs[0], depth)
        if op.type == "Pack":
            return _chained([self.elements(operand, depth) for operand in op.inputs])
        if op.type == "ConcatV2":
            return _chained(
                [self.elements(operand, depth) for operand in op.inputs[:-1]]
            )
        if op.type == "ExpandDims" and tensor.shape.rank == 1:
            return self.elements(op.inputs[0], depth)
        if op.type == "StridedSlice":
            return self._sliced(op, depth)
        if op.type == "Slice":
            return self._cut(op, depth)
        if op.type in ("GatherV2", "Gather"):
            return self._gathered(op, depth)
        if op.type == "Prod":
            return self._product(op, depth)
        if op.type in _PAIRS:
            return self._pairs(op, depth)
        if op.type == "DynamicStitch":
            return self._stitched(op, depth)
        return None

    def of_shape(self, tensor: tf.Tensor) -> list[Element] | None:
        """Returns the sizes of a tensor."""
        if tensor.shape.rank is None:
            return None
        value = self._of(tensor)
        sizes: list[Element] = [
            (0, self._which(tensor, axis)) if size is None else size
            for axis, size in enumerate(shapes.sizes(tensor))
        ]
        if value.kind is Kind.ROWS:
            sizes[value.axis] = None if value.some is not None else rows(value.each)
        elif value.kind in (Kind.UNKNOWN, Kind.PLACES):
            sizes = [size if isinstance(size, int) else None for size in sizes]
        return sizes

    def _which(self, tensor: tf.Tensor, axis: int, depth: int = 0) -> Hashable:
        """Returns a key that is equal for sizes that are always equal.

        Args:
            tensor: A tensor.
            axis: The axis of one of its sizes, which is not known.
            depth: How many ops have been followed back.
        """
        op, own = tensor.op, (tensor.ref(), axis)
        if depth > 30:
            return own
        if op.type in _KEEP_SIZES:
            for operand in op.inputs:
                if operand.shape.rank == tensor.shape.rank:
                    if shapes.sizes(operand)[axis] is None:
                        return self._which(operand, axis, depth + 1)
        if op.type in _MULTIPLY and axis < tensor.shape.rank - 2:
            if op.inputs[0].shape.rank == tensor.shape.rank:
                if shapes.sizes(op.inputs[0])[axis] is None:
                    return self._which(op.inputs[0], axis, depth + 1)
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            if order is not None:
                return self._which(op.inputs[0], int(order[axis]), depth + 1)
        if op.type == "Reshape":
            target = self.elements(op.inputs[1], depth + 1)
            return which(target[axis]) or own if target else own
        if op.type == "Tile" and op.inputs[0].shape.rank is not None:
            times = self.elements(op.inputs[1], depth + 1)
            if times and shapes.sizes(op.inputs[0])[axis] == 1:
                return which(times[axis]) or own
            if times and times[axis] == 1:
                return self._which(op.inputs[0], axis, depth + 1)
        return own

    def _sliced(self, op: tf.Operation, depth: int) -> list[Element] | None:
        source = self.elements(op.inputs[0], depth)
        bounds = [tf.get_static_value(one) for one in op.inputs[1:]]
        if source is None or any(one is None or len(one) != 1 for one in bounds):
            return None
        begin, end, stride = (int(one[0]) for one in bounds)
        if op.get_attr("shrink_axis_mask") & 1:
            return [source[begin]] if -len(source) <= begin < len(source) else None
        if op.get_attr("new_axis_mask") or op.get_attr("ellipsis_mask"):
            return None
        kept_range = slice(
            None if op.get_attr("begin_mask") & 1 else begin,
            None if op.get_attr("end_mask") & 1 else end,
            stride,
        )
        return source[kept_range]

    def _cut(self, op: tf.Operation, depth: int) -> list[Element] | None:
        source, begin, size = (self.elements(operand, depth) for operand in op.inputs)
        if source is None or begin is None or size is None:
            return None
        first, count = begin[0], size[0]
        if not isinstance(first, int) or not isinstance(count, int):
            return None
        return source[first : None if count < 0 else first + count]

    def _gathered(self, op: tf.Operation, depth: int) -> list[Element] | None:
        source = self.elements(op.inputs[0], depth)
        places = self.elements(op.inputs[1], depth)
        if source is None or places is None:
            return None
        if not all(isinstance(k, int) and k < len(source) for k in places):
            return None
        return [source[k] for k in places if isinstance(k, int)]

    def _product(self, op: tf.Operation, depth: int) -> list[Element] | None:
        source = self.elements(op.inputs[0], depth)
        axes = tf.get_static_value(op.inputs[1])
        if source is None or axes is None:
            return None
        if op.inputs[0].shape.rank != 1:
            return None
        product: Element = 1
        for element in source:
            product = _times(product, element)
        return [product]

    def _pairs(self, op: tf.Operation, depth: int) -> list[Element] | None:
        ones, twos = (self.elements(one, depth) for one in op.inputs)
        if ones is None or twos is None:
            return None
        count = max(len(ones), len(twos))
        if {len(ones), len(twos)} - {1, count}:
            return None
        pairs = zip(
            ones * (count // len(ones)) if ones else [],
            twos * (count // len(twos)) if twos else [],
            strict=False,
        )
        return [_PAIRS[op.type](one, two) for one, two in pairs]

    def _stitched(self, op: tf.Operation, depth: int) -> list[Element] | None:
        half = len(op.inputs) // 2
        elements: dict[int, Element] = {}
        for indices, data in zip(op.inputs[:half], op.inputs[half:], strict=True):
            places = self.elements(indices, depth)
            values = self.elements(data, depth)
            if places is None or values is None or len(places) != len(values):
                return None
            for place, value in zip(places, values, strict=True):
                if not isinstance(place, int):
                    return None
                elements[place] = value
        return [elements[k] for k in sorted(elements)]


def rows(each: int | None) -> Element:
    """Returns the size of an axis that has some rows for each example."""
    return GROWS if each is None else (1, each)


def grows(element: Element) -> bool:
    """Whether a size is a multiple of the number of examples."""
    return isinstance(element, tuple) and element[0] == 1


def each(element: Element) -> int | None:
    """Returns how many times the number of examples a size is; None if unknown."""
    if not isinstance(element, tuple) or not grows(element) or len(element) < 2:
        return None
    return element[1] if isinstance(element[1], int) else None


def which(element: Element) -> Hashable:
    """Returns a key of a size that has nothing to do with the examples, or None."""
    if not isinstance(element, tuple) or element[0] != 0 or len(element) < 2:
        return None
    return element[1]


def are_equal(sizes: Sequence[Element], target: Sequence[Element]) -> bool:
    """Whether products of sizes are certain to be equal, though not all are known."""
    known_sizes, others = (
        [
            math.prod(s for s in elements if isinstance(s, int))
            for elements in (sizes, target)
        ],
        [
            collections.Counter(which(s) for s in elements if not isinstance(s, int))
            for elements in (sizes, target)
        ],
    )
    is_known = not any(None in keys for keys in others)
    return is_known and known_sizes[0] == known_sizes[1] and others[0] == others[1]


def known(target: Sequence[Element]) -> list[int | None]:
    """Returns the sizes of a shape, with None for those that are not known."""
    return [size if isinstance(size, int) else None for size in target]


def count(sizes: Sequence[int | None]) -> int | str:
    """Returns a product of sizes."""
    known_sizes = [size for size in sizes if size is not None]
    return math.prod(known_sizes) if len(known_sizes) == len(sizes) else UNKNOWN_SIZE


def grown(elements: Sequence[Element] | None) -> tuple[int | None, bool]:
    """Returns the index of the number of examples, and whether all elements are known.

    The index is None if no element is a number of examples.
    """
    if elements is None or None in elements:
        return None, False
    places = [
        k
        for k, element in enumerate(elements)
        if isinstance(element, tuple) and element[0] != 0
    ]
    if not places:
        return None, True
    is_single = len(places) == 1 and grows(elements[places[0]])
    return (places[0], True) if is_single else (None, False)


def _chained(parts: list[list[Element] | None]) -> list[Element] | None:
    elements: list[Element] = []
    for part in parts:
        if part is None:
            return None
        elements += part
    return elements


def _power(one: Element) -> Power | None:
    if one is None:
        return None
    return one[0] if isinstance(one, tuple) else 0


def _times(one: Element, two: Element) -> Element:
    if isinstance(one, int) and isinstance(two, int):
        return one * two
    if one == 1 or two == 1:
        return two if one == 1 else one
    if isinstance(one, int):
        one, two = two, one
    times = each(one)
    if isinstance(two, int) and times is not None:
        return (1, times * two)
    powers = _power(one), _power(two)
    if powers[0] is None or powers[1] is None:
        return None
    return (powers[0] + powers[1],)


def _over(one: Element, two: Element) -> Element:
    if isinstance(one, int) and isinstance(two, int):
        return one // two if two else None
    # Gradients divide sizes by their own factors, so there is no remainder.
    if two == 1:
        return one
    if _power(one) is None or _power(two) is None:
        return None
    return (0,) if _power(one) == 0 and _power(two) == 0 else None


def _plain(choose: Callable[[int, int], int]) -> Callable[[Element, Element], Element]:
    def chosen(one: Element, two: Element) -> Element:
        if isinstance(one, int) and isinstance(two, int):
            return choose(one, two)
        return FIXED if _power(one) == 0 == _power(two) else None

    return chosen


def _extreme(
    choose: Callable[[int, int], int],
) -> Callable[[Element, Element], Element]:
    def chosen(one: Element, two: Element) -> Element:
        if isinstance(one, int) and isinstance(two, int):
            return choose(one, two)
        if one == two:
            return one
        if two == 1 and choose is max:  # sizes are at least 1
            return one
        return FIXED if _power(one) == 0 == _power(two) else None

    return chosen


_PAIRS: dict[str, Callable[[Element, Element], Element]] = {
    "Mul": _times,
    "FloorDiv": _over,
    "Maximum": _extreme(max),
    "Minimum": _extreme(min),
    **dict.fromkeys(("Add", "AddV2"), _plain(operator.add)),
    "Sub": _plain(operator.sub),
    "FloorMod": _plain(lambda one, two: one % two if two else 0),
}
