"""How a variable in parts is read: joined, or by rows where these are; and gradients.

What is read is tied to the variable's handle by one op, IdentityN with a gradient of
its own: the parts are unknown to tapes and tf.gradients, and the gradient of the whole
arrives for the whole. graph/passes/ties.py takes the ties of a step out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context
from replicator.graph.passes.ties import GRADIENT_TYPE


def joined(variable: Any) -> tf.Tensor:
    """Returns the whole value of a PartitionedVariable.

    Args:
        variable: The variable, of any shape.
    """
    _tf.note_access(variable)
    with _tf.stop_recording():
        value = tf.concat([part.read_value() for part in variable.parts], variable.axis)
        value.set_shape(variable.shape)
    return _tied(variable, value)


def rows(variable: Any, indices: Any) -> tf.Tensor:
    """Returns rows of a PartitionedVariable; their owners alone are asked for them.

    Args:
        variable: The variable, shape [n, ...].
        indices: Which rows, integers of any shape.

    Returns:
        A tensor of shape [*indices.shape, ...].
    """
    indices = tf.convert_to_tensor(indices)
    _tf.note_access(variable)
    with _tf.stop_recording():
        own = [part.sparse_read for part in variable.parts]
        value = gathered(own, indices, variable.axis, variable.sizes)
        value.set_shape(indices.shape.concatenate(variable.shape[1:]))
    return _tied(variable, value, indices)


def gathered(
    readers: Sequence[Any], indices: tf.Tensor, axis: int, sizes: Sequence[int]
) -> tf.Tensor:
    """Joins rows of parts.

    Args:
        readers: `readers[k]` returns rows of part k.
        indices: Rows of the whole, integers of any shape.
        axis: Along which it is in parts.
        sizes: Of the parts, along the axis.
    """
    if axis:
        columns = [reader(indices) for reader in readers]
        # Each has the axes of the indices in place of the first one.
        return tf.concat(columns, axis - 1 + tf.rank(indices))
    flat = tf.reshape(indices, [-1])
    owners = owners_of(flat, sizes)
    places = tf.dynamic_partition(tf.range(tf.size(flat)), owners, len(sizes))
    found = [
        reader(local) for reader, local in zip(readers, local_rows(flat, sizes), strict=True)
    ]
    value = tf.dynamic_stitch(places, found)
    if indices.shape.rank == 1:
        return value
    return tf.reshape(value, tf.concat([tf.shape(indices), tf.shape(value)[1:]], 0))


def owners_of(flat: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Returns in which part each row of a whole is, an int32 [rows].

    Rows that do not exist are the first or the last part's, which refuses them.
    """
    owners = tf.zeros_like(flat, tf.int32)
    for bound in offsets_of(sizes)[1:]:
        owners += tf.cast(flat >= tf.constant(bound, flat.dtype), tf.int32)
    return owners


def local_rows(flat: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Returns for each part those rows of the whole that are its, by its own numbers."""
    split = tf.dynamic_partition(flat, owners_of(flat, sizes), len(sizes))
    return [
        own - tf.constant(offset, flat.dtype)
        for own, offset in zip(split, offsets_of(sizes), strict=True)
    ]


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Returns where each part begins."""
    return [sum(sizes[:k]) for k in range(len(sizes))]


def _tied(
    variable: Any, value: tf.Tensor, indices: tf.Tensor | None = None
) -> tf.Tensor:
    """Has gradients of what was read arrive at the variable's handle."""
    replica = context.current()
    if not (value.dtype.is_floating or value.dtype.is_complex):
        return value
    if replica is not None and replica.updating:
        return value  # by an optimizer, whose updates nobody differentiates
    graph: Any = tf.compat.v1.get_default_graph()
    handle, eager = variable.handle, tf.executing_eagerly()
    if not eager and graph.building_function:
        handle = graph.capture(handle)  # before recording stops: tapes have to see it
    known = [value, handle] if indices is None else [value, handle, indices]
    with _tf.stop_recording():
        if eager:
            result = tf.identity(value)
        else:
            with graph.gradient_override_map({"IdentityN": GRADIENT_TYPE}):
                result = tf.raw_ops.IdentityN(input=known)[0]
        result.set_shape(value.shape)
    shape = variable.shape
    _tf.record_gradient(
        "parts", [result], [handle], lambda d: [_gradient(d, indices, shape)]
    )
    return result if eager else tf.identity(result)


def _gradient(
    upstream: Any, indices: tf.Tensor | None, shape: tf.TensorShape
) -> tf.Tensor | tf.IndexedSlices:
    """Returns the gradient of the whole variable, dense or of the rows that were read."""
    if indices is None:
        return upstream
    row = shape[1:].as_list()
    return tf.IndexedSlices(
        tf.reshape(tf.convert_to_tensor(upstream), [-1, *row]),
        tf.reshape(indices, [-1]),
        tf.constant(shape.as_list(), tf.int32),
    )


@tf.RegisterGradient(GRADIENT_TYPE)
def _gradient_of_tie(op: tf.Operation, *upstream: Any) -> list[Any]:
    """tf.gradients asks here; tapes ask what `_tied` recorded."""
    if upstream[0] is None:
        return [None] * len(op.inputs)
    indices = op.inputs[2] if len(op.inputs) > 2 else None
    own = _gradient(upstream[0], indices, _tf.resource_shape(op.inputs[1]))
    return [None, own, *([] if indices is None else [None])]
