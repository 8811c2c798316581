# SPDX-License-Identifier: Apache-2.0
"""What a variable holds once a part of it is written, as a value.

For variables that one replica owns: a step in which the replicas write different parts
agrees on the mean of what each of them would hold, and nobody has a component to write
into.
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
    """Whether `written` knows what a method writes."""
    kind, _, how = method.rpartition("_")
    slices = method == "_strided_slice_assign"
    return slices or kind in ("scatter", "scatter_nd") and how in _MERGED


def written(variable: Any, method: str, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Returns the value of a variable, with a part of it written.

    Args:
        variable: What would be written.
        method: By which method, "scatter_add" for example.
        *args: Its arguments.
        **kwargs: Its arguments by name.

    Returns:
        The value. Where there is no such function of tensors, the value as it was, in a
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
    storage.need_components(variable, f"written by {method}, as no op on tensors can")
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
    """Returns what is written as a tensor of the variable's dtype.

    Given an eager tensor inside of a function, TensorFlow does not look at its dtype.
    """
    given = getattr(updates, "dtype", dtype)
    if tf.is_tensor(updates) and given != dtype:
        raise base.bad_argument(
            "the scatter method of a variable",
            f"was given values of {given.name}, but the variable is of {dtype.name}",
            "tf.cast them first.",
        )
    return tf.convert_to_tensor(updates, dtype)


def _slice_assigned(before: tf.Tensor, **arguments: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(arguments.pop("value"), before.dtype)
    return tf.raw_ops.TensorStridedSliceUpdate(input=before, value=value, **arguments)
