# SPDX-License-Identifier: Apache-2.0
"""Computes the value that a variable has after a part of it is written.

For variables that one replica owns: where replicas write different parts in a step,
they agree on the mean of the values that each would get, and there is no component per
replica to write into. Of a variable whose aggregation is SUM, only what is added to a
part can be summed.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.primitives import base
from replicator.variables import agreement, storage

_SUM = tf.VariableAggregation.SUM

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


def write(variable: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Writes a part of a variable by writing the whole value.

    Args:
        variable: The variable.
        method: The method that writes the part, e.g. "scatter_add".
        *args: The method's arguments.
        **kwargs: The method's keyword arguments.

    Returns:
        The variable after the write.

    Raises:
        ArgumentError: The replicas would sum what they cannot: whole values.
    """
    replica = context.current()
    if (
        replica is None
        or variable.aggregation != _SUM
        or replica.mode.updating
        or agreement.is_equal(variable, replica)
    ):
        return variable.assign(written(variable, method, *args, **kwargs))
    if not has_value(method) or not method.endswith(("_add", "_sub")):
        method = "v[...].assign" if method == "_strided_slice_assign" else method
        raise base.bad_argument(
            f"{method} of variable {variable.name}, whose aggregation is SUM,",
            "has no meaning in a step",
            "assign the whole value; or use scatter_add or scatter_sub, of which the "
            "variable gets the sum.",
        )
    zeros = tf.zeros_like(variable.read_value())
    return variable.assign_add(_with_part(zeros, method, *args, **kwargs))


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
    if has_value(method):
        return _with_part(value, method, *args, **kwargs)
    storage.need_components(
        variable, f"written by {method}, which no op on tensors can do"
    )
    return value


def _with_part(before: tf.Tensor, method: str, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Returns a value with a part of it written by a method that `has_value`."""
    if method == "_strided_slice_assign":
        return _slice_assigned(before, *args, **kwargs)
    kind, _, how = method.rpartition("_")
    of_kind = _rows_written if kind == "scatter" else _slices_written
    return of_kind(before, _MERGED[how], *args, **kwargs)


def _rows_written(
    value: tf.Tensor, merge: Any, sparse_delta: tf.IndexedSlices, *_: Any, **__: Any
) -> tf.Tensor:
    if not isinstance(sparse_delta, tf.IndexedSlices):
        raise base.bad_argument(
            "the scatter method of a variable",
            f"was given {errors.repr_of(sparse_delta)}",
            "it takes tf.IndexedSlices(values, indices).",
        )
    indices = tf.convert_to_tensor(sparse_delta.indices)
    updates = _of_dtype(sparse_delta.values, value.dtype)
    if updates.shape.rank == 0:  # one number for all rows, which these ops do not take
        shape = tf.concat([tf.shape(indices), tf.shape(value)[1:]], 0)
        updates = tf.broadcast_to(updates, shape)
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
