# SPDX-License-Identifier: Apache-2.0
"""Reads and writes variables with less Python per op, and reads them less often."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import execute as _execute
from tensorflow.python.eager import record
from tensorflow.python.framework import op_callbacks as _op_callbacks
from tensorflow.python.ops import resource_variable_ops as _rvo

from replicator._tf.fast.nodes import add_op, type_attribute

_NEEDED = (
    _execute.must_record_gradient,
    _execute.record_gradient,
    _op_callbacks.should_invoke_op_callbacks,
    _rvo._maybe_set_handle_data,
    _rvo.variable_accessed,
    record.could_possibly_record,
    record.record_operation,
    tf.Graph._current_control_dependencies,
    tf.Graph._get_control_flow_context,
)

_WRITERS = {
    "assign": "AssignVariableOp",
    "assign_add": "AssignAddVariableOp",
    "assign_sub": "AssignSubVariableOp",
}


def _is_quick(variable: Any) -> bool:
    """Whether what is below adds to a graph what a variable's own methods would add.

    Not where nothing is traced, nor where a debugger sees each op as it is added.
    """
    graph = tf.compat.v1.get_default_graph()
    cached = getattr(variable, "_caching_device", None) is not None
    return (
        graph.building_function
        and not cached
        and not _op_callbacks.should_invoke_op_callbacks()
    )


def read_quickly(variable: Any) -> tf.Tensor | None:
    """Adds a read of a variable to the function graph that is being traced.

    TensorFlow's own method looks at the definition of the op at each call, which takes
    twice as long. Steps read and write hundreds of variables on each replica.

    Returns:
        None where only the variable's own method adds what it should.
    """
    if not _is_quick(variable):
        return None
    _rvo.variable_accessed(variable)
    variable._variable_read = True
    handle, dtype = variable.handle, variable.dtype
    op = add_op("ReadVariableOp", [handle], {"dtype": type_attribute(dtype)})
    (value,) = op.outputs
    if _execute.must_record_gradient():  # forward accumulators use this record
        attributes = ("dtype", dtype.as_datatype_enum)
        _execute.record_gradient(op.type, op.inputs, attributes, [value])
    _rvo._maybe_set_handle_data(dtype, handle, value)
    record.record_operation(
        "ReadVariableOp", [value], [handle], _read_differentiated, _read_differentiated
    )
    return value


def _read_differentiated(gradient: tf.Tensor) -> list[tf.Tensor]:
    return [gradient]


def write_quickly(
    variable: Any, method: str, value: Any, name: str | None
) -> tf.Operation | None:
    """Adds an assignment to a variable to the function graph that is being traced.

    Args:
        variable: Is written.
        method: "assign", "assign_add" or "assign_sub".
        value: Is assigned, added or subtracted.
        name: Of the op.

    Returns:
        None where only the variable's own method adds what it should, or says why it
        cannot: the shapes do not fit.
    """
    if not _is_quick(variable):
        return None
    tensor = tf.convert_to_tensor(value, variable.dtype)
    handle, type_ = variable.handle, _WRITERS[method]
    attributes = {"dtype": type_attribute(variable.dtype)}
    if method == "assign":
        if not variable.shape.is_compatible_with(tensor.shape):
            return None
        known = variable._validate_shape and variable.shape.is_fully_defined()
        attributes["validate_shape"] = tf.compat.v1.AttrValue(b=known)
    return add_op(type_, [handle, tensor], attributes, name)


def place_of_reads() -> tuple[Any, Any] | None:
    """Returns what is equal where a variable, read twice, need not be read again.

    None where a tape may record what is added, or ops are made to wait for others. What
    is recorded and waited for, the public API only tells of one tape and of ops.
    """
    graph = tf.compat.v1.get_default_graph()
    if record.could_possibly_record() or graph._current_control_dependencies():
        return None
    return graph, graph._get_control_flow_context()
