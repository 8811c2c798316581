# SPDX-License-Identifier: Apache-2.0
"""Computes the elements of small tensors of integers that come from shapes.

Each op is computed by NumPy's function of the same meaning, on arrays of elements
(sizes.py): numbers, multiples of a number of rows, and what is known at run time only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator.forms.forms import Fact, Partial, Sharded
from replicator.forms.sizes import (
    INTEGERS,
    SMALL,
    UNKNOWN,
    WHOLE,
    SumTo,
    are_same,
    array,
    is_size,
    shape_of,
)

_MASKS = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")


def index(
    op: tf.Operation, begin: Sequence[Any], end: Sequence[Any], strides: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns what a StridedSlice selects, as NumPy writes it."""
    masks = {name: op.get_attr(f"{name}_mask") for name in _MASKS}
    result: list[Any] = []
    for k, (b, e, s) in enumerate(zip(begin, end, strides, strict=True)):
        on = {name: bool(bits >> k & 1) for name, bits in masks.items()}
        if on["ellipsis"] or on["new_axis"]:
            result.append(... if on["ellipsis"] else None)
        elif on["shrink_axis"]:
            result.append(b)
        else:
            limits = None if on["begin"] else b, None if on["end"] else e
            result.append(slice(*limits, s))
    return tuple(result)


def evaluate(op: tf.Operation, facts: Sequence[Fact]) -> list[Any] | None:
    """Returns the elements of an op's outputs, or None if they are not from shapes.

    Args:
        op: The op.
        facts: What is known of its inputs.
    """
    if op.type in _ABOUT:
        return _ABOUT[op.type](op, facts)
    function = _FUNCTIONS.get(op.type)
    if function is None or not all(map(_is_small, op.outputs)):
        return None
    known = [_elements(t, fact) for t, fact in zip(op.inputs, facts, strict=True)]
    if any(one is None for one in known) or all(f.numbers is None for f in facts):
        return None
    try:
        found = function(op, *known)
    except (TypeError, ValueError, IndexError, ArithmeticError):  # not a number
        return None
    results = found if isinstance(found, list) else [found]
    is_ready = (SumTo, np.ndarray, type(None))
    made = [one if isinstance(one, is_ready) else array([one], ()) for one in results]
    return made if all(map(_is_in_range, op.outputs, made)) else None


def _is_small(tensor: tf.Tensor) -> bool:
    return tensor.dtype in INTEGERS and (tensor.shape.num_elements() or 0) <= SMALL


def _is_in_range(tensor: tf.Tensor, made: Any) -> bool:
    """Whether integers of the tensor's type are like Python's, which never overflow."""
    numbers = made.flat if isinstance(made, np.ndarray) else ()
    low, high = tensor.dtype.min, tensor.dtype.max
    return all(not isinstance(one, int) or low <= one <= high for one in numbers)


def _elements(tensor: tf.Tensor, fact: Fact) -> np.ndarray | None:
    if fact.numbers is not None or tensor.dtype not in INTEGERS:
        return fact.numbers if isinstance(fact.numbers, np.ndarray) else None
    size = tensor.shape.num_elements()
    if size is None or size > SMALL or isinstance(fact.form, Sharded | Partial):
        return None
    return np.full(tensor.shape.as_list(), UNKNOWN, object)


def _about_shapes(op: tf.Operation, facts: Sequence[Fact]) -> list[Any] | None:
    """Returns what an op says of the shapes of its inputs."""
    pairs = zip(op.inputs, facts, strict=True)
    found: list[Any] = [shape_of(t, fact) for t, fact in pairs]
    if any(one is None for one in found):
        return None
    if op.type in ("Shape", "ShapeN"):
        return found
    one = len(found[0]) if op.type == "Rank" else np.multiply.reduce(found[0])
    return [array([one], ())]


def _constant(op: tf.Operation, facts: Sequence[Fact]) -> list[Any] | None:
    (out,) = op.outputs
    if not _is_small(out):
        return None
    return [np.asarray(tf.get_static_value(out)).astype(object)]


_ABOUT: dict[str, Callable[..., list[Any] | None]] = {
    **dict.fromkeys(("Shape", "ShapeN", "Size", "Rank"), _about_shapes),
    "Const": _constant,
}


def _same(op: tf.Operation, x: np.ndarray, *others: Any) -> np.ndarray:
    return x.reshape(op.outputs[0].shape.as_list())


def _sliced(op: tf.Operation, x: Any, begin: Any, end: Any, strides: Any) -> Any:
    return x[index(op, begin, end, strides)]


def _slice(op: tf.Operation, x: Any, begin: Any, size: Any) -> Any:
    pairs = zip(begin, size, strict=True)
    return x[tuple(slice(b, None if s == -1 else b + s) for b, s in pairs)]


def _gathered(op: tf.Operation, x: Any, ids: Any, axis: Any) -> Any:
    if op.get_attr("batch_dims"):
        return None
    return np.take(x, ids.astype(int), int(axis))


def _stitched(op: tf.Operation, *inputs: np.ndarray) -> np.ndarray:
    half = len(inputs) // 2
    places = [int(one) for part in inputs[:half] for one in part.flat]
    values = [one for part in inputs[half:] for one in part.flat]
    result = [UNKNOWN] * (max(places) + 1)
    for place, value in zip(places, values, strict=True):
        result[place] = value
    return array(result)


def _offsets(op: tf.Operation, axis: Any, *shapes: np.ndarray) -> list[np.ndarray]:
    results, at = [], 0
    for shape in shapes:
        offsets = array([0] * len(shape))
        offsets[int(axis)] = at
        at = at + shape[int(axis)]
        results.append(offsets)
    return results


def _folded(function: np.ufunc) -> Callable[..., Any]:
    def fold(op: tf.Operation, x: np.ndarray, axes: np.ndarray) -> Any:
        axis = tuple(map(int, axes.flat))
        return function.reduce(x, axis=axis, keepdims=op.get_attr("keep_dims"))

    return fold


def _aligned(a: np.ndarray, b: np.ndarray) -> list[tuple[Any, Any]]:
    """Returns the pairs of sizes of two shapes that broadcast."""
    size = max(len(a), len(b))
    wide = [[1] * (size - len(one)) + list(one) for one in (a, b)]
    return list(zip(*wide, strict=True))


def _broadcast(op: tf.Operation, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return array([_wider(x, y) for x, y in _aligned(a, b)])


def _wider(x: Any, y: Any) -> Any:
    if x == 1 or x == y:
        return y
    if y == 1 or isinstance(x, int):
        return x
    return WHOLE if is_size(x) or is_size(y) else y


def _gradient_axes(op: tf.Operation, a: np.ndarray, b: np.ndarray) -> list[Any]:
    """Returns None if the versions differ.

    One shape is of shards, and one is not. Or shards are along two axes, as of
    x[:, None] * x[None]: one of the two was gathered.
    """
    of_rows = [pair for pair in _aligned(a, b) if any(map(is_size, pair))]
    if len(of_rows) > 1 or any(
        1 not in pair and pair[0] != pair[1] for pair in of_rows
    ):
        return [None, None]
    both, axes = (tuple(a), tuple(b)), max(len(a), len(b))
    is_none = are_same(*both)
    return [SumTo(one, axes, bool(of_rows) and not is_none, is_none) for one in both]


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return WHOLE if is_size(a) or is_size(b) or WHOLE in (a, b) else UNKNOWN


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        "Identity StopGradient PreventGradient Snapshot Cast EnsureShape Reshape "
        "ExpandDims Squeeze".split(),
        _same,
    ),
    "Pack": lambda op, *xs: np.stack(xs, op.get_attr("axis")),
    "Unpack": lambda op, x: list(np.moveaxis(x, op.get_attr("axis"), 0)),
    "ConcatV2": lambda op, *xs: np.concatenate(xs[:-1], int(xs[-1])),
    "Split": lambda op, axis, x: np.split(x, op.get_attr("num_split"), int(axis)),
    "StridedSlice": _sliced,
    "Slice": _slice,
    "GatherV2": _gathered,
    "Transpose": lambda op, x, order: np.transpose(x, [int(o) for o in order]),
    "InvertPermutation": lambda op, x: np.argsort(x.astype(int)).astype(object),
    "ReverseV2": lambda op, x, axes: np.flip(x, tuple(map(int, axes))),
    "Prod": _folded(np.multiply),
    "Sum": _folded(np.add),
    **dict.fromkeys(("AddV2", "Add"), lambda op, a, b: a + b),
    "Sub": lambda op, a, b: a - b,
    "Mul": lambda op, a, b: a * b,
    "FloorDiv": lambda op, a, b: a // b,
    "FloorMod": lambda op, a, b: a % b,
    "Maximum": lambda op, a, b: np.frompyfunc(_larger, 2, 1)(a, b),
    "Range": lambda op, *limits: array(list(range(*map(int, limits)))),
    "Fill": lambda op, dims, x: np.full([int(d) for d in dims], x.item(), object),
    "ZerosLike": lambda op, x: np.full(x.shape, 0, object),
    "OnesLike": lambda op, x: np.full(x.shape, 1, object),
    "DynamicStitch": _stitched,
    "ConcatOffset": _offsets,
    "BroadcastArgs": _broadcast,
    "BroadcastGradientArgs": _gradient_axes,
}
