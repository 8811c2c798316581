# SPDX-License-Identifier: Apache-2.0
"""Small tensors of integers that are computed from shapes, element by element.

A size of the whole batch, Shape(x)[0], serves two purposes. In arithmetic it is a
number, the same on all replicas: `sum / n`. As the size of something that is sharded,
each replica needs its own: `zeros([n, 4])`. Such tensors hence have two versions: the
value of one device, and the local one. The elements of a tensor say where these differ:

    3           a number known while the graph is built
    UNKNOWN     known at run time, the same on all replicas
    Size(l, 2)  twice the number of rows: of all in the one version, of its own in the
                other
    WHOLE       computed from sizes, but only of the whole: n + 1

Elements are added, multiplied and divided like numbers, in NumPy's arrays of objects.
evaluation.py does so for ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator.forms.forms import REPLICATED, UNSET, Fact, Form, Layout, Sharded
from replicator.forms.rule import LOCAL, Version

INTEGERS = (tf.int32, tf.int64)
SMALL = 64  # elements; larger tensors are not computed from shapes


class _Element:
    """Neither a number nor a Size."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def _with(self, other: Any) -> _Element:
        return UNKNOWN if other is UNKNOWN and self is UNKNOWN else WHOLE

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, int):
            return 0 if other == 0 else self
        is_multiple = self is UNKNOWN and is_size(other)
        return Size(other.layout) if is_multiple else self._with(other)

    def __add__(self, other: Any) -> _Element:
        return self if isinstance(other, int) else self._with(other)

    __radd__ = __sub__ = __rsub__ = __add__
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __add__
    __rmul__ = __mul__


UNKNOWN, WHOLE = _Element("?"), _Element("whole")


@dataclasses.dataclass(frozen=True)
class Size:
    """So many times the number of rows of a layout.

    Attributes:
        layout: The layout.
        factor: How many times; None: known at run time.
        outer: How many of these are blocks, if it is the size of something sharded.
    """

    layout: Layout
    factor: int | None = None
    outer: int | None = dataclasses.field(default=None, compare=False)

    def _scaled(self, factor: int) -> Any:
        return Size(self.layout, factor) if factor else 0

    def _added(self, other: Any, sign: int) -> Any:
        if isinstance(other, int) and other == 0:
            return self
        both = is_size(other) and other.layout is self.layout
        if both and self.factor is not None and other.factor is not None:
            return self._scaled(self.factor + sign * other.factor)
        return WHOLE

    def __add__(self, other: Any) -> Any:
        return self._added(other, 1)

    def __sub__(self, other: Any) -> Any:
        return self._added(other, -1)

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return Size(self.layout) if other is UNKNOWN else WHOLE
        if self.factor is None and other:
            return self
        return self._scaled((self.factor or 0) * other)

    def __floordiv__(self, other: Any) -> Any:
        factor = self.factor
        if is_size(other):
            both = other.layout is self.layout and factor and other.factor
            return (
                factor // other.factor if both and not factor % other.factor else WHOLE
            )
        if not isinstance(other, int) or other <= 0 or factor is None or factor % other:
            return WHOLE
        return self._scaled(factor // other)

    def _whole(self, other: Any) -> Any:
        return WHOLE

    __radd__, __rmul__ = __add__, __mul__
    __rsub__ = __rfloordiv__ = __mod__ = __rmod__ = _whole


@dataclasses.dataclass(frozen=True)
class SumTo:
    """Axes along which a gradient is summed so that it gets these sizes.

    Attributes:
        sizes: The sizes, which are those of the last axes.
        axes: The number of axes, which are the first ones of the gradient.
        is_of_rows: Whether one of the two that broadcast has rows, this one or the
            other: which axes are summed then differs for one row of all and for none
            of a replica.
        is_none: Whether no axis is summed, as the gradient has these sizes.
    """

    sizes: tuple[Any, ...]
    axes: int
    is_of_rows: bool = False
    is_none: bool = False


@dataclasses.dataclass(frozen=True)
class Summed:
    """What was summed along such axes, and has all of them until it is reshaped.

    Attributes:
        axes: How many it has, which the graph for one device may not say.
        sizes: Its sizes, if no axis was summed.
    """

    axes: int
    sizes: tuple[Any, ...] | None = None


def is_size(element: Any) -> bool:
    """Whether an element of a tensor is a multiple of a number of rows."""
    return isinstance(element, Size)


def has_local(fact: Fact) -> bool:
    """Whether there is a local version of a tensor, too."""
    if isinstance(fact.numbers, SumTo):
        return fact.numbers.is_of_rows
    if fact.rows is not None or any(map(has_local, fact.branches)):
        return True
    return isinstance(fact.numbers, np.ndarray) and any(map(is_size, fact.numbers.flat))


def ints(fact: Fact) -> list[int] | None:
    """Returns the elements of a tensor if all are numbers, else None."""
    if isinstance(fact.numbers, SumTo) and fact.numbers.is_none:
        return []
    if not isinstance(fact.numbers, np.ndarray):
        return None
    known = all(isinstance(one, int) for one in fact.numbers.flat)
    return list(fact.numbers.flat) if known else None


def are_same(one: Sequence[Any] | None, other: Sequence[Any]) -> bool:
    """Whether two shapes are known to be the same."""
    return one is not None and [*one] == [*other] and all(map(_is_known, one))


def _is_known(size: Any) -> bool:
    return size.factor is not None if is_size(size) else isinstance(size, int)


def axes_of(op: tf.Operation, fact: Fact) -> list[int] | None:
    """Returns axes of an op's first input, none negative; None: they are unknown.

    Args:
        op: The op.
        fact: What is known of the axes.
    """
    rank, found = op.inputs[0].shape.rank, ints(fact)
    return None if rank is None or found is None else [axis % rank for axis in found]


def product(elements: Iterable[Any]) -> int | None:
    """Returns the product of sizes; None: one of them is unknown."""
    result = 1
    for one in elements:
        if not isinstance(one, int) or one < 0:
            return None
        result *= one
    return result


def array(elements: Sequence[Any], shape: Any = -1) -> np.ndarray:
    """Returns an array of elements, which NumPy takes for objects."""
    flat = np.empty(len(elements), object)
    flat[:] = elements
    return flat.reshape(shape)


def shape_of(tensor: tf.Tensor, fact: Fact) -> np.ndarray | None:
    """Returns the elements of a tensor's shape, or None if its rank is unknown."""
    if tensor.shape.rank is None:
        return None
    sizes = [UNKNOWN if size is None else size for size in tensor.shape.as_list()]
    if isinstance(fact.form, Sharded):
        form = fact.form
        sizes[form.axis] = Size(form.layout, form.factor, form.outer)
    return array(sizes)


def elements(tensor: tf.Tensor, fact: Fact) -> list[Any] | None:
    """Returns the elements of a vector of integers, or None.

    Args:
        tensor: The vector.
        fact: What is known of it.
    """
    if isinstance(fact.numbers, np.ndarray):
        return list(fact.numbers.flat)
    count = tensor.shape.num_elements()
    is_same = count is not None and fact.form == REPLICATED
    return [UNKNOWN] * count if is_same else None


def fitting(sizes: Sequence[Any] | None, form: Sharded) -> Form | Version | None:
    """Returns which version of a shape fits something of this form.

    Args:
        sizes: The elements of the shape.
        form: The form, whose axis is counted as in the shape.

    Returns:
        REPLICATED or LOCAL. None: neither fits, because another axis has the size of
        something sharded, too, or this one that of rows of something else.
    """
    sizes = sizes or ()
    places = [k for k, one in enumerate(sizes) if is_size(one)]
    if not places:
        return REPLICATED
    is_own = places == [form.axis] and sizes[form.axis].layout is form.layout
    return LOCAL if is_own and WHOLE not in sizes else None


def joined(one: Fact, other: Fact) -> Any:
    """Returns the elements of a tensor that is one or the other, by turns."""
    a, b = one.numbers, other.numbers
    if UNSET in (one.form, other.form):
        return b if one.form == UNSET else a
    both = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    if not both or a.shape != b.shape:
        is_other = not isinstance(a, np.ndarray) and type(a) is type(b)
        return a if is_other and a == b else None
    return array([_one_of(*pair) for pair in zip(a.flat, b.flat, strict=True)], a.shape)


def _one_of(a: Any, b: Any) -> Any:
    if type(a) is type(b) and a == b:
        return a
    are_whole = all(isinstance(one, int) or one is UNKNOWN for one in (a, b))
    return UNKNOWN if are_whole else WHOLE
