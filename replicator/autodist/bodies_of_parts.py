# SPDX-License-Identifier: Apache-2.0
"""Conditionals, loops and function calls that are given variables in parts.

In the place of a handle they are given that of the first part; those of the others
come behind all that they were given before, so that their results are where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import uses
from replicator.autodist.rewriting import Divide, Handles, Rewriter

_READ_ONLY = "_read_only_resource_inputs"
_OUTSIDE = "AutoDist-given"
_RESOURCE = tf.resource.as_datatype_enum


def call(made: Rewriter, op: tf.Operation, divide: Divide) -> tf.Operation:
    """Adds an op that calls what an op does, with all parts.

    Args:
        made: Copies the graph in which it is.
        op: Calls functions.
        divide: Puts what uses parts in the place of an op.
    """
    inputs: list[tf.Tensor] = []
    more: list[tf.Tensor] = []
    divided: list[tuple[int, Handles]] = []
    for k, tensor in enumerate(op.inputs):
        handles = made.handles.get(id(tensor))
        if handles is None:
            inputs.append(made.tensor(tensor))
            continue
        divided.append((k, handles))
        inputs.append(handles.parts[0])
        more += handles.parts[1:]
    begin = len(op.inputs) - len(uses.arguments(op))
    inside = [(k - begin, handles) for k, handles in divided]
    node = _node(op, divided, len(more))
    for attribute, value in node.attr.items():
        functions = [value.func] if value.HasField("func") else value.list.func
        for function in functions:
            function.name = _body(op, attribute, function.name, inside, divide)
    new = _add(made, node, [*inputs, *more])
    _after(made, op, new, divided)
    return new


def _node(op: tf.Operation, divided: Sequence[tuple[int, Handles]], more: int) -> Any:
    """Returns an op as a node, with types and shapes of what it is given beside."""
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(op.node_def)
    del node.input[:]
    node.attr.pop("_class", None)
    for name in ("Tin", "T"):
        if name in node.attr:
            node.attr[name].list.type.extend([_RESOURCE] * more)
    if op.type in uses.LOOPS and node.attr["output_shapes"].list.shape:
        for _ in range(more):
            node.attr["output_shapes"].list.shape.add()
    if _READ_ONLY in node.attr:
        first = len(op.inputs)
        known = node.attr[_READ_ONLY].list.i
        for k, handles in divided:
            count = len(handles.parts) - 1
            if k in known:
                known.extend(range(first, first + count))
            first += count
    return node


def _add(made: Rewriter, node: Any, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """Adds the op of a node."""
    definition = tf.compat.v1.GraphDef()
    given = {}
    for k, tensor in enumerate(inputs):
        name = f"{_OUTSIDE}{k}:0"
        node.input.append(name)
        given[name] = tensor
    definition.node.append(node)
    (new,) = _tf.import_nodes(made.target, definition, given, "")
    _tf.add_control_inputs(new, made.before)
    return new


def _after(
    made: Rewriter,
    op: tf.Operation,
    new: tf.Operation,
    divided: Sequence[tuple[int, Handles]],
) -> None:
    """Notes which results of the new op are handles, and of what."""
    for tensor, result in zip(op.outputs, new.outputs, strict=False):
        if tensor.dtype in (tf.resource, tf.variant):
            _tf.copy_handle_data(tensor, result)
    if op.type not in uses.LOOPS:
        return
    first = len(op.outputs)
    for k, handles in divided:
        count = len(handles.parts) - 1
        own = (new.outputs[k], *new.outputs[first : first + count])
        for handle, result in zip(handles.parts, own, strict=True):
            _tf.copy_handle_data(handle, result)
        made.divide(op.outputs[k], Handles(handles.cut, own))
        first += count


def _body(
    op: tf.Operation,
    attribute: str,
    name: str,
    divided: Sequence[tuple[int, Handles]],
    divide: Divide,
) -> str:
    """Returns a copy of a function, which takes variables in parts.

    Args:
        op: Calls it.
        attribute: By which.
        name: The function's.
        divided: Which of its arguments are divided, and the handles outside.
        divide: Puts what uses parts in the place of an op.
    """
    found = _tf.function_called(op, name)
    assert found is not None, "it was found before"
    body, results = found
    inside = _tf.new_function_graph("parts")
    _tf.copy_functions(body, inside)
    own = Rewriter(body, inside, divide)
    places = dict(divided)
    for k, tensor in enumerate(body.inputs):
        like = places[k].parts[0] if k in places else tensor
        own.give(tensor, _tf.add_input(inside, like, tensor.shape))
    for k, handles in divided:
        first = own.tensor(body.inputs[k])
        more = [_tf.add_input(inside, h, h.shape) for h in handles.parts[1:]]
        own.divide(body.inputs[k], Handles(handles.cut, (first, *more)))
    given = {tensor.op for tensor in body.inputs}
    own.add([op for op in body.get_operations() if op not in given])
    with inside.as_default():
        outputs = [_result(own, tensor) for tensor in results]
        if attribute == "body":
            for k, _ in divided:
                outputs += own.handles[id(body.inputs[k])].parts[1:]
    must_run = [own.places[one] for one in body.control_outputs]
    return _tf.finish_function(inside, outputs, must_run)


def _result(made: Rewriter, tensor: tf.Tensor) -> tf.Tensor:
    handles = made.handles.get(id(tensor))
    return made.tensor(tensor) if handles is None else handles.parts[0]
