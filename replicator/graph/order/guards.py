# SPDX-License-Identifier: Apache-2.0
"""Guards: ops that fail before any variable is written if a write would fail.

Rows that do not exist and values of another shape are detected only by the write, when
other writes may have happened. So each write that can fail in these ways gets a guard:
an op on its device that fails where the write would, and that graph/order/phases.py
orders before all writes. Writes inside a replica's own conditional, loop or function
get none.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import tensorflow as tf

from replicator._tf import effects, ops
from replicator.graph.ir import shapes
from replicator.graph.ir.kinds import kind_of

# The names in op definitions of the rows that an op writes, and of their values.
_INDICES = "indices"
_VALUES = ("value", "updates", "grad", "delta")

_operands: dict[str, dict[str, int]] = {}  # by op type; op.op_def is a costly copy


def add(
    writes: Iterable[tf.Operation], fitting: Container[tf.Operation] = frozenset()
) -> list[tf.Operation]:
    """Adds guards to writes, which are ops of one graph; returns the guards.

    Args:
        writes: Ops that write variables.
        fitting: Those of as many rows as there are indices.
    """
    return [
        guard
        for op in writes
        if not kind_of(op).calls
        for guard in _guards(op, op in fitting)
    ]


def _guards(write: tf.Operation, fits: bool) -> Iterator[tf.Operation]:
    """Yields the guards of a write; if it fits, it has as many rows as indices."""
    operands = _operands_of(write)
    value = next((write.inputs[operands[n]] for n in _VALUES if n in operands), None)
    if value is None or write.type == "ResourceStridedSliceAssign":
        return
    static_shape = ops.resource_shape(write.inputs[0])
    if not static_shape.is_fully_defined():
        return
    shape = static_shape.as_list()
    is_known = value.shape.is_fully_defined()
    with tf.control_dependencies(None), tf.device(write.device):
        if _INDICES not in operands:
            if not is_known:  # else it fits, or the op would not have been built
                yield _shape_fits(write, value, shape)
            return
        indices = write.inputs[operands[_INDICES]]
        # The last axis of an op's indices may address several axes of the variable.
        by_element = write.type.startswith("ResourceScatterNd")
        axes = 1 if not by_element else (shapes.static(indices) or [None])[-1]
        if axes is None:
            return
        if tf.DeviceSpec.from_string(write.device).device_type != "GPU":
            yield _rows_exist(write, indices, shape[:axes])  # no GPU fails
        row = shapes.static(value) if fits else None
        is_known &= indices.shape.is_fully_defined()
        if is_known or value.shape.rank == 0 or (row and list(row[1:]) == shape[1:]):
            return
        one_number = write.type.startswith("ResourceScatter") and not by_element
        places = tf.shape(indices)[: -1 if by_element else None]
        needed = tf.concat([places, shape[axes:]], 0)
        yield _shape_fits(write, value, needed, one_number)


def _rows_exist(
    write: tf.Operation, indices: tf.Tensor, end: list[int]
) -> tf.Operation:
    """Returns a guard against rows that do not exist, past `end` along an axis."""
    exist = (indices >= 0) & (indices < tf.constant(end, indices.dtype))
    text = (
        f"{write.name} writes rows that do not exist; there are {end}, and it writes:"
    )
    return _assert(tf.reduce_all(exist), [text, indices])


def _shape_fits(
    write: tf.Operation, value: tf.Tensor, shape: Any, one_number: bool = False
) -> tf.Operation:
    """Returns a guard against a value of another shape than the op can write.

    Args:
        write: The op that writes it.
        value: The value that it writes.
        shape: The shape that the value must have.
        one_number: Whether the value may also be a scalar.
    """
    value_shape = shapes.when_run(value)
    text = f"{write.name} writes a value whose shape differs from what it writes to:"
    # Not one comparison, which would broadcast sizes, or fail with another message.
    same = tf.raw_ops.Equal(x=value_shape, y=shape, incompatible_shape_error=False)
    fits = tf.reduce_all(same) & tf.equal(tf.size(value_shape), tf.size(shape))
    if one_number:
        fits |= tf.equal(tf.size(value_shape), 0)
    return _assert(fits, [text, value_shape, shape])


def _assert(condition: tf.Tensor, data: list[Any]) -> tf.Operation:
    """Returns an assertion that is not ordered with others.

    An op without an effect would not do: nothing uses its value, so TensorFlow may
    prune it. And tf.debugging.Assert adds a conditional at times.
    """
    op = tf.raw_ops.Assert(condition=condition, data=data, name="guard")
    effects.run_independently(op.graph, op)
    return op


def _operands_of(op: tf.Operation) -> dict[str, int]:
    """Returns the positions of an op's operands, by their names."""
    if op.type not in _operands:
        arguments = op.op_def.input_arg
        _operands[op.type] = {a.name: k for k, a in enumerate(arguments)}
    return _operands[op.type]
