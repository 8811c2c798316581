# SPDX-License-Identifier: Apache-2.0
"""Static shapes as plain tuples, under both TensorFlow 1 and 2 behavior.

Under `tf.compat.v1.disable_v2_behavior()` or `disable_v2_tensorshape()`, the sizes in a
tf.TensorShape are Dimensions: not hashable, never None, and neither equal nor unequal
to others where they are unknown. So nothing else in this library takes a tf.TensorShape
apart; tests/graph/ir/test_shapes.py checks this.
"""

from __future__ import annotations

import tensorflow as tf

Shape = tuple[int | None, ...] | None  # None: unknown rank; None inside: unknown size


def static(tensor: tf.Tensor) -> Shape:
    """Returns a tensor's static shape."""
    shape = tensor.shape
    return None if shape.rank is None else tuple(shape.as_list())


def sizes(tensor: tf.Tensor) -> tuple[int | None, ...]:
    """Returns the static sizes of a tensor of known rank."""
    shape = static(tensor)
    assert shape is not None, tensor
    return shape


def size(tensor: tf.Tensor, axis: int) -> int | None:
    """Returns a static size; None if it, or the rank, is unknown."""
    shape = static(tensor)
    return None if shape is None else shape[axis]


def with_rows(shape: tf.TensorShape, rows: int | None = None) -> tf.TensorShape:
    """Returns a shape with another first size; None: unknown."""
    return tf.TensorShape([rows]).concatenate(shape[1:])


def of_any_rows(spec: tf.TypeSpec) -> tf.TypeSpec:
    """Returns the spec of a tensor, also a sparse or ragged one, of any first size."""
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = with_rows(spec.shape)
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    if isinstance(spec, tf.SparseTensorSpec) or type(spec) is tf.TensorSpec:
        shape = with_rows(spec.shape) if spec.shape.rank else spec.shape
        return type(spec)(shape, spec.dtype)
    return spec


def when_run(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's run-time shape, hidden from TensorFlow's shape inference.

    TensorFlow infers shapes from a tensor's uses, on the assumption that these succeed,
    for example that all operands of an AddN have one shape. It would thus fold a
    comparison of tf.shape to true before anything runs. An optional hides the shape
    from it.
    """
    hidden = tf.raw_ops.OptionalFromValue(components=[tensor])
    (value,) = tf.raw_ops.OptionalGetValue(
        optional=hidden, output_types=[tensor.dtype], output_shapes=[None]
    )
    return tf.shape(value)


def defined(tensor: tf.Tensor) -> tuple[int, ...]:
    """Returns the sizes of a tensor with a fully defined static shape."""
    assert tensor.shape.is_fully_defined(), tensor
    return tuple(tensor.shape.as_list())
