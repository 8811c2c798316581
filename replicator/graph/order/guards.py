"""What could make a write itself fail is asked before any variable is written.

Rows that do not exist and values of another shape are found by the write, when others
may be done. So each write that can fail by them gets a guard: an op of its device that
fails where the write would, and that graph/order/phases.py has come before all writes.
What is inside a replica's own conditional, loop or function gets none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import shapes, switching
from replicator.graph.ir.kinds import kind_of
from replicator.graph.order.effects import writes_at

# What op definitions call where an op writes, and what.
_INDICES = "indices"
_VALUES = ("value", "updates", "grad", "delta")

_operands: dict[str, dict[str, int]] = {}  # by op type; op.op_def is a costly copy


def add(
    ops: Iterable[tf.Operation], flow: switching.Flow = switching.NONE
) -> list[tf.Operation]:
    """Adds ops that fail if a write would; returns them.

    Args:
        ops: Those with effects, in one graph.
        flow: What of them is in control flow of TensorFlow 1, and gets no guard.
    """
    guards: list[tf.Operation] = []
    for op in ops:
        kind = kind_of(op)
        if kind.calls or not kind.resources or not writes_at(op, 0) or op in flow:
            continue
        operands = _operands_of(op)
        value = next((op.inputs[operands[n]] for n in _VALUES if n in operands), None)
        if value is None or op.type == "ResourceStridedSliceAssign":
            continue
        indices = op.inputs[operands[_INDICES]] if _INDICES in operands else None
        if indices is None and value.shape.is_fully_defined():
            continue  # it fits, or the op would not have been built
        shape = _tf.resource_shape(op.inputs[0])
        if not shape.is_fully_defined():
            continue
        with tf.control_dependencies(None), tf.device(op.device):
            if indices is None:
                guards.append(_shape_fits(op, value, shape.as_list()))
            else:
                guards += _rows_fit(op, indices, value, shape.as_list())
    return guards


def _rows_fit(
    op: tf.Operation, indices: tf.Tensor, rows: tf.Tensor, shape: list[int]
) -> Iterator[tf.Operation]:
    """Yields what fails if an op writes rows that do not exist, or do not fit.

    Args:
        op: Writes them. On GPUs, it leaves out what does not exist.
        indices: Which; if `op` writes elements, their last axis goes along several axes
            of the variable.
        rows: What is written; one number for all elements, if a scalar.
        shape: Of the variable.
    """
    axes, places = 1, tf.shape(indices)
    if op.type.startswith("ResourceScatterNd"):
        known = shapes.static(indices)
        last = known[-1] if known else None
        if last is None:
            return
        axes, places = last, places[:-1]
    if tf.DeviceSpec.from_string(op.device or "").device_type != "GPU":
        exist = (indices >= 0) & (indices < tf.constant(shape[:axes], indices.dtype))
        text = f"{op.name} writes rows that do not exist, of {shape[:axes]}, among:"
        yield _assert(tf.reduce_all(exist), [text, indices])
    fixed = indices.shape.is_fully_defined() and rows.shape.is_fully_defined()
    if not fixed and rows.shape.rank != 0:
        yield _shape_fits(op, rows, tf.concat([places, shape[axes:]], 0))


def _shape_fits(op: tf.Operation, value: tf.Tensor, shape: Any) -> tf.Operation:
    """Returns what fails if an op writes a value of another shape.

    TensorFlow infers the shape from the write, as if that could not fail, unless it
    cannot see through to the value.
    """
    hidden = tf.raw_ops.OptionalFromValue(components=[value])
    (seen,) = tf.raw_ops.OptionalGetValue(
        optional=hidden, output_types=[value.dtype], output_shapes=[None]
    )
    own = tf.shape(seen)
    text = f"{op.name} writes a value of another shape than is written:"
    return _assert(tf.reduce_all(tf.equal(own, shape)), [text, own, shape])


def _assert(condition: tf.Tensor, data: list[Any]) -> tf.Operation:
    """Returns an assertion, in no order with others.

    An op without an effect would not do: nothing uses its value, so TensorFlow may
    leave it out. And tf.debugging.Assert adds a conditional at times.
    """
    op = tf.raw_ops.Assert(condition=condition, data=data)
    _tf.run_independently(op.graph, op)
    return op


def _operands_of(op: tf.Operation) -> dict[str, int]:
    """Returns the positions of an op's operands, by their names."""
    if op.type not in _operands:
        arguments = op.op_def.input_arg
        _operands[op.type] = {a.name: k for k, a in enumerate(arguments)}
    return _operands[op.type]
