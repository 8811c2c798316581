# SPDX-License-Identifier: Apache-2.0
"""Copies single ops of one graph into another, with other inputs and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph as _from_definition
from tensorflow.python.framework import ops as _ops

from replicator._tf.frames import copy_line
from replicator._tf.functions import _function, function_called, named

_OF_THE_ORIGINAL = ("_class", "_output_shapes", "_read_only_resource_inputs")


def has_state(op: tf.Operation) -> bool:
    """Whether an op's type is registered as one with state; public calls do not say."""
    return bool(op._is_stateful)


def is_function(op: tf.Operation) -> bool:
    """Whether an op's type is a function, as tf.compat.v1's Defun makes them.

    TensorFlow's own ctc_loss has such ops; no public call tells.
    """
    return _function(op, op.type) is not None


def attributes_of(op: tf.Operation) -> dict[str, Any]:
    """Returns an op's attributes, as messages: `get_attr` returns them decoded."""
    attributes = op.node_def.attr
    return {k: attributes[k] for k in attributes if k not in _OF_THE_ORIGINAL}


def attributes_text(op: tf.Operation) -> bytes:
    """Returns an op's attributes as bytes, which are equal for equal ones."""
    node = op.node_def
    del node.input[:]
    node.name = node.device = ""
    for name in _OF_THE_ORIGINAL:
        node.attr.pop(name, None)
    return bytes(node.SerializeToString(deterministic=True))


def add_copy(
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    attributes: Mapping[str, Any],
    changes: Mapping[str, Any],
    control_inputs: Sequence[tf.Operation] = (),
) -> tf.Operation:
    """Adds an op like `op`, perhaps of another graph, to the default graph.

    The public tf.Graph.create_op warns and knows nothing of the functions that the op
    calls, nor of the user's line.

    Args:
        op: The original.
        inputs: The inputs of the copy.
        attributes: What `attributes_of` returns of the original.
        changes: The attributes to change, as Python values.
        control_inputs: Ops of the default graph that run before it.
    """
    graph: Any = _ops.get_default_graph()
    attributes = {**attributes, **{k: _attribute(v) for k, v in changes.items()}}
    _define_functions(op, attributes, graph)
    with tf.control_dependencies(control_inputs):
        new: tf.Operation = graph._create_op_internal(
            op.type,
            list(inputs),
            [t.dtype for t in op.outputs],
            name=op.name,
            attrs=attributes,
            op_def=op.op_def,
        )
    copy_line(op, new)
    return new


def _define_functions(
    op: tf.Operation, attributes: Mapping[str, Any], graph: Any
) -> None:
    """Registers the functions that an op calls where its copy is added."""
    names = [op.type]  # also a function's name
    for value in attributes.values():
        names += [function.name for function in named(value)]
    for name in names:
        function = _function(op, name)
        if function is not None:
            graph._add_function_recursive(function)


def _attribute(value: Any) -> tf.compat.v1.AttrValue:
    if isinstance(value, bool):
        return tf.compat.v1.AttrValue(b=value)
    if isinstance(value, int):
        return tf.compat.v1.AttrValue(i=value)
    if isinstance(value, str):
        return tf.compat.v1.AttrValue(s=value.encode())
    if isinstance(value, tf.DType):
        return tf.compat.v1.AttrValue(type=value.as_datatype_enum)
    return tf.compat.v1.AttrValue(shape=tf.TensorShape(value).as_proto())


def function_graph(
    op: tf.Operation, attribute: str, position: int = 0
) -> tuple[Any, list[tf.Tensor]]:
    """Returns the graph of a function that `op` calls, and the tensors it returns.

    A function that exists only in C++ is imported into a graph; see `called_graphs`.

    Args:
        op: The op.
        attribute: The op's attribute that names the function; of an op whose type is a
            function, any.
        position: Its position, if that is a list of functions.
    """
    value = op.node_def.attr[attribute] if not is_function(op) else None
    if value is None:
        name = op.type
    else:
        name = value.list.func[position].name if value.list.func else value.func.name
    function = function_called(op, name)
    if function is not None:
        return function
    definition = _function(op, name).cached_definition
    shapes = [t.shape for t in op.inputs[-len(definition.signature.input_arg) :]]
    with op.graph.as_default():  # which knows the functions that this one calls
        graph = _from_definition.function_def_to_graph(definition, input_shapes=shapes)
    return graph, list(graph.outputs)
