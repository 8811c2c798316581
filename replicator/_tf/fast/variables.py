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
    """Whether this module adds the same ops as a variable's own methods would.

    Not outside of tracing, nor where a debugger sees each op as it is added.
    """
    graph = tf.compat.v1.get_default_graph()
    cached = getattr(variable, "_caching_device", None) is not None
    return (
        graph.building_function
        and not cached
        and not _op_callbacks.should_invoke_op_callbacks()
    )


def read_quickly(variable: Any) -> tf.Tensor | None:
    """Adds a read of a variable to the function graph being traced.

    TensorFlow's own method looks up the op's definition at each call, which takes twice
    as long. Steps read and write hundreds of variables on each replica.

    Returns:
        The value, or None where the variable's own method is needed.
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
    """Adds an assignment to a variable to the function graph being traced.

    Args:
        variable: The variable to write.
        method: "assign", "assign_add" or "assign_sub".
        value: The value to assign, add or subtract.
        name: The op's name.

    Returns:
        The op, or None where the variable's own method is needed, if only to raise for
        shapes that do not match.
    """
    if not _is_quick(variable):
        return None
    tensor = tf.convert_to_tensor(value, variable.dtype)
    handle, type_ = variable.handle, _WRITERS[method]
    attributes = {"dtype": type_attribute(variable.dtype)}
    if method == "assign":
        if not variable.shape.is_compatible_with(tensor.shape):
            return None
        validate = variable._validate_shape and variable.shape.is_fully_defined()
        attributes["validate_shape"] = tf.compat.v1.AttrValue(b=validate)
    return add_op(type_, [handle, tensor], attributes, name)


def place_of_reads() -> tuple[Any, Any] | None:
    """Returns a key that is equal where a read of a variable can be reused.

    None where a tape may record the read, or where new ops get control inputs. The
    public API tells only what one tape records, and what existing ops wait for.
    """
    graph = tf.compat.v1.get_default_graph()
    if record.could_possibly_record() or graph._current_control_dependencies():
        return None
    return graph, graph._get_control_flow_context()
