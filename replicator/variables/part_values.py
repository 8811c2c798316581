# SPDX-License-Identifier: Apache-2.0
"""Computes the value that a variable has after a part of it is written.

For variables that one replica owns: where replicas write different parts in a step,
they agree on the mean of the values that each would get, and there is no component per
replica to write into.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.primitives import base
from replicator.variables import storage

_MERGED = {
    "add": tf.tensor_scatter_nd_add,
    "sub": tf.tensor_scatter_nd_sub,
    "max": tf.tensor_scatter_nd_max,
    "min": tf.tensor_scatter_nd_min,
    "update": tf.tensor_scatter_nd_update,
}


def has_value(method: str) -> bool:
    """Whether `written` can compute what a method writes."""
    kind, _, how = method.rpartition("_")
    slices = method == "_strided_slice_assign"
    return slices or kind in ("scatter", "scatter_nd") and how in _MERGED


def written(variable: Any, method: str, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Returns the value that a variable would have with a part of it written.

    Args:
        variable: The variable.
        method: The method that writes the part, e.g. "scatter_add".
        *args: The method's arguments.
        **kwargs: The method's keyword arguments.

    Returns:
        The value. If no function on tensors does the same, the unchanged value, in a
        build that will start over.
    """
    value = variable.read_value()
    if method == "_strided_slice_assign":
        return _slice_assigned(value, *args, **kwargs)
    kind, _, how = method.rpartition("_")
    if kind == "scatter" and how in _MERGED:
        return _rows_written(value, _MERGED[how], *args, **kwargs)
    if kind == "scatter_nd":
        return _slices_written(value, _MERGED[how], *args, **kwargs)
    storage.need_components(
        variable, f"written by {method}, which no op on tensors can do"
    )
    return value


def _rows_written(
    value: tf.Tensor, merge: Any, sparse_delta: tf.IndexedSlices, *_: Any, **__: Any
) -> tf.Tensor:
    if not isinstance(sparse_delta, tf.IndexedSlices):
        raise base.bad_argument(
            "the scatter method of a variable",
            f"was given {errors.shown(sparse_delta)}",
            "it takes tf.IndexedSlices(values, indices).",
        )
    indices = tf.convert_to_tensor(sparse_delta.indices)
    updates = _of_dtype(sparse_delta.values, value.dtype)
    return merge(value, indices[..., tf.newaxis], updates)


def _slices_written(
    value: tf.Tensor, merge: Any, indices: Any, updates: Any, *_: Any, **__: Any
) -> tf.Tensor:
    return merge(value, indices, _of_dtype(updates, value.dtype))


def _of_dtype(updates: Any, dtype: tf.DType) -> tf.Tensor:
    """Converts updates to the variable's dtype.

    TensorFlow does not check the dtype of an eager tensor inside a function.
    """
    actual = getattr(updates, "dtype", dtype)
    if tf.is_tensor(updates) and actual != dtype:
        raise base.bad_argument(
            "the scatter method of a variable",
            f"was given values of {actual.name}, but the variable is of {dtype.name}",
            "tf.cast them first.",
        )
    return tf.convert_to_tensor(updates, dtype)


def _slice_assigned(before: tf.Tensor, **arguments: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(arguments.pop("value"), before.dtype)
    return tf.raw_ops.TensorStridedSliceUpdate(input=before, value=value, **arguments)
