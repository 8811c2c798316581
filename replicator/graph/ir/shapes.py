# SPDX-License-Identifier: Apache-2.0
"""Static shapes as plain numbers, whichever TensorFlow's behavior is.

Under `tf.compat.v1.disable_v2_behavior()` or `disable_v2_tensorshape()`, the sizes of a
tf.TensorShape are Dimensions: not hashable, never None, and neither equal nor unequal
to others where they are unknown. So nothing else in this library takes a tf.TensorShape
apart; tests/graph/test_shapes.py looks.
"""

from __future__ import annotations

import tensorflow as tf

Shape = tuple[int | None, ...] | None  # None: unknown rank; None inside: unknown size


def static(tensor: tf.Tensor) -> Shape:
    """Returns what is known of a tensor's shape while the graph is built."""
    shape = tensor.shape
    return None if shape.rank is None else tuple(shape.as_list())


def sizes(tensor: tf.Tensor) -> tuple[int | None, ...]:
    """Returns the sizes of a tensor, which has a known rank."""
    known = static(tensor)
    assert known is not None, tensor
    return known


def when_run(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the shape that a tensor turns out to have, to be compared with another.

    TensorFlow infers shapes from what uses a tensor, as if that could not fail: that
    all operands of an AddN are of one shape, say. A comparison of tf.shape would be
    found true before anything runs. It does not see through an optional.
    """
    hidden = tf.raw_ops.OptionalFromValue(components=[tensor])
    (seen,) = tf.raw_ops.OptionalGetValue(
        optional=hidden, output_types=[tensor.dtype], output_shapes=[None]
    )
    return tf.shape(seen)


def defined(tensor: tf.Tensor) -> tuple[int, ...]:
    """Returns the sizes of a tensor, all of which are known."""
    assert tensor.shape.is_fully_defined(), tensor
    return tuple(tensor.shape.as_list())
