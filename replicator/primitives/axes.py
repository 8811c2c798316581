# SPDX-License-Identifier: Apache-2.0
"""Checks axes, and concatenates and splits along them.

Shared by the primitives that gather, scatter or exchange slices. An axis of None is a
new leading one, with one entry per participant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, context, errors
from replicator.graph.ir import shapes
from replicator.graph.ir.placeholder import Value
from replicator.primitives import base

_MOST_AXES = 254  # the most axes of a TensorFlow tensor


def check(what: str, axis: Any, name: str = "axis", optional: bool = False) -> None:
    """Raises ArgumentError unless `axis` is an int, or None where that is allowed."""
    if (axis is None and optional) or arguments.is_whole(axis, -_MOST_AXES, _MOST_AXES):
        return
    raise base.bad_argument(
        what,
        f"was given {name}={errors.repr_of(axis)}",
        f"{name} is a Python int{' or None' if optional else ''}.",
    )


def position(
    what: str, axis: int, value: Value, name: str = "axis", optional: bool = False
) -> int:
    """Returns an axis, counted from the start if the rank is known.

    Raises:
        ArgumentError: The value has no such axis.
    """
    if value.shape is None:
        return axis
    rank = len(value.shape)
    if -rank <= axis < rank:
        return axis % rank
    if rank:
        hint = f"{name} lies between {-rank} and {rank - 1}"
        hint += ", or is None for a new axis." if optional else "."
    else:
        hint = f"a scalar has no axis; {'use axis=None' if optional else 'reshape it'}"
        hint += (
            ". A list of numbers is a nest of scalars; tf.constant makes it a tensor."
        )
    raise base.bad_argument(what, f"was given {name}={axis} for {value}", hint)


def joined(what: str, value: Value, axis: int | None, count: int) -> Value:
    """Returns dtype and shape of `count` such values concatenated along an axis."""
    if axis is not None:
        where = position(what, axis, value, optional=True)
        return resized(value, where, None)
    if value.shape is None:
        return value
    return Value(value.dtype, (count, *value.shape))


def slice_of(
    what: str, value: Value, axis: int | None, index: int, count: int
) -> Value:
    """Returns dtype and shape of one of the `count` slices that `cut` makes.

    Raises:
        ArgumentError: The value has no such axis, or, without an axis, not `count`
            entries.
    """
    if axis is not None:
        where = position(what, axis, value, optional=True)
        size = None if value.shape is None else value.shape[where]
        if size is not None and size % count and context.will_be_copied():
            size = None  # the slices of copies have other sizes
        return resized(
            value, where, None if size is None else share(size, index, count)
        )
    if value.shape is None:
        return value
    if not value.shape or value.shape[0] not in (None, count):
        raise base.bad_argument(
            what,
            f"was given {value} for {count} replicas",
            f"without an axis, the value is [{count}, ...]: one entry per replica.",
        )
    return Value(value.dtype, value.shape[1:])


def resized(value: Value, axis: int, size: int | None) -> Value:
    """Returns a value with another size along an axis, counted from the start."""
    if value.shape is None:
        return value
    shape = tuple(size if k == axis else old for k, old in enumerate(value.shape))
    return Value(value.dtype, shape)


def share(size: int, index: int, count: int) -> int:
    """Returns the index-th of `count` shares of `size`; the first ones get one more."""
    return size // count + (index < size % count)


def cut(
    tensor: tf.Tensor, axis: int | None, count: int, sizes: Any = None
) -> list[tf.Tensor]:
    """Splits a tensor into `count` slices.

    Args:
        tensor: A tensor that has this axis.
        axis: The axis; None: take the entries along the first axis.
        count: The number of slices.
        sizes: int32 [count], the size of each slice along `axis`; equal shares by
            default.
    """
    if axis is None:
        return tf.unstack(tensor, num=count)
    if sizes is None:
        sizes = _shares(tensor, axis, count)
    return split(tensor, sizes, axis, count)


def split(tensor: tf.Tensor, sizes: Any, axis: int, count: int) -> list[tf.Tensor]:
    """Splits a tensor into `count` slices: of `sizes`, or of one size.

    The sizes must add up at run time. A tf.split into one slice gives an empty float32
    inside control flow (TensorFlow 2.21): grappler prunes the split.
    """
    if count > 1:
        return tf.split(tensor, count if sizes is None else sizes, axis, num=count)
    if sizes is None:
        return [tf.identity(tensor)]
    whole, _ = tf.split(tensor, tf.concat([sizes, [0]], 0), axis, num=2)
    return [whole]


def _shares(tensor: tf.Tensor, axis: int, count: int) -> Any:
    """Returns the sizes of all shares along an axis."""
    static_shape = shapes.static(tensor)
    size = None if static_shape is None else static_shape[axis]
    if size is not None:
        return [share(size, index, count) for index in range(count)]
    size = tf.shape(tensor)[axis]
    return size // count + tf.cast(tf.range(count) < size % count, tf.int32)


def join(tensors: Sequence[tf.Tensor], axis: int | None) -> tf.Tensor:
    """Concatenates tensors along an axis; their other sizes are equal."""
    return tf.stack(tensors) if axis is None else tf.concat(tensors, axis)
