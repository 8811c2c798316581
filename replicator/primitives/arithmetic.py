# SPDX-License-Identifier: Apache-2.0
"""Sums and folds in an order that TensorFlow keeps, and shapes checked at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import choice, tapes


def add_in_order(column: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sums one tensor per replica, in replica order, as `fold` would.

    A chain of sums of two, each of which adds in place to the previous result. An AddN
    of three or more would start with whichever operand has a reusable buffer, which is
    known only at run time; an AddN of two can only swap its operands.

    Shapes that differ at run time raise an InvalidArgumentError.
    """
    if len(column) == 1:
        return tf.identity(column[0])
    nodes, dtype = choice.Nodes(), column[0].dtype

    def shielded(x: tf.Tensor | int, shape: tf.TensorShape) -> int:
        return nodes.add("PlaceholderWithDefault", [x], dtype=dtype, shape=shape)

    shape = column[0].shape
    operands = [shielded(x, x.shape) for x in column]
    total = operands[0]
    for x, operand in zip(column[1:], operands[1:], strict=True):
        shape = shape.merge_with(x.shape)
        total = shielded(nodes.add("AddN", [total, operand], N=2, T=dtype), shape)
    ops = nodes.finish("add_in_order")
    result = ops[total].outputs[0]
    inputs = [ops[operand].inputs[0] for operand in operands]
    tapes.record_gradient("AddInOrder", [result], inputs, lambda d: [d] * len(inputs))
    return result


def fold(
    combine: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], column: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Combines one tensor per replica from left to right, in an order that is kept."""
    if len(column) == 1:
        return tf.identity(column[0])
    result, *others = map(shield, column)
    for operand in others:
        result = shield(combine(result, operand))
    return result


def holds(x: tf.Tensor, extremum: tf.Tensor) -> tf.Tensor:
    """Where a replica's tensor equals the extremum; NaN counts as equal to NaN."""
    same = tf.equal(x, extremum)
    if not x.dtype.is_floating:
        return same
    return same | (tf.math.is_nan(x) & tf.math.is_nan(extremum))


def shield(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that TensorFlow's graph optimizer does not look through.

    Grappler merges additions, the user's with ours, into one AddN whose operands it
    sorts by name; factors out common factors; folds constants of products and sums;
    and turns x + x into a product with a constant, whose control edge from another
    device makes a loop hang (TensorFlow 2.21; seen with a broadcast that is reduced).
    So each operand of a reduction is shielded, and each result.
    """
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def hop(tensor: tf.Tensor) -> tf.Tensor:
    """Reads a tensor on the current device and keeps the order of a sum.

    Grappler would prune an identity, and the tensor would be sent from its origin.
    """
    return shield(tensor)


def ensure_shape(tensor: tf.Tensor, shape: Any) -> tf.Tensor:
    """Checks a shape at run time.

    tf.ensure_shape with an unknown rank fails if TensorFlow infers the rank, as it does
    where a function is called with tensors of more specific shapes. An unknown rank is
    therefore not checked at all.
    """
    if tf.TensorShape(shape).rank is None:
        return tf.raw_ops.PlaceholderWithDefault(
            input=tensor, shape=tf.TensorShape(None)
        )
    return tf.ensure_shape(tensor, shape)


def divide(total: tf.Tensor, count: int) -> tf.Tensor:
    """Divides by a number that is not 0.

    Grappler would turn a plain division by a constant into a multiplication by its
    reciprocal. For a power of two that gives the same bits, in two thirds of the time.
    """
    if total.dtype.is_floating and count & (count - 1) == 0:
        return total * tf.cast(1 / count, total.dtype)
    return tf.math.divide_no_nan(total, tf.cast(count, total.dtype))
