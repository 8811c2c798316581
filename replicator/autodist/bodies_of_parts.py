# SPDX-License-Identifier: Apache-2.0
"""Passes partitioned variables to conditionals, loops and function calls.

The first part's handle takes the place of the whole's; those of the other parts follow
all other inputs, so that results keep their positions.
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
    """Repeats an op that calls functions, passing all parts of its variables.

    Args:
        made: The rewriter of the op's graph.
        op: The op.
        divide: Replaces an op that uses a partitioned variable.
    """
    inputs: list[tf.Tensor] = []
    further_handles: list[tf.Tensor] = []
    divided: list[tuple[int, Handles]] = []
    for k, tensor in enumerate(op.inputs):
        handles = made.handles.get(id(tensor))
        if handles is None:
            inputs.append(made.tensor(tensor))
            continue
        divided.append((k, handles))
        inputs.append(handles.parts[0])
        further_handles += handles.parts[1:]
    first_argument = len(op.inputs) - len(uses.arguments(op))
    inside = [(k - first_argument, handles) for k, handles in divided]
    node = _node(op, divided, len(further_handles))
    for attribute, value in node.attr.items():
        functions = [value.func] if value.HasField("func") else value.list.func
        for function in functions:
            function.name = _body(op, attribute, function.name, inside, divide)
    new_op = _add(made, node, [*inputs, *further_handles])
    _after(made, op, new_op, divided)
    return new_op


def _node(op: tf.Operation, divided: Sequence[tuple[int, Handles]], more: int) -> Any:
    """Returns the node of an op, with types and shapes of the further inputs."""
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
        first_further = len(op.inputs)
        read_only = node.attr[_READ_ONLY].list.i
        for k, handles in divided:
            count = len(handles.parts) - 1
            if k in read_only:
                read_only.extend(range(first_further, first_further + count))
            first_further += count
    return node


def _add(made: Rewriter, node: Any, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """Adds the op of a node."""
    definition = tf.compat.v1.GraphDef()
    inputs_by_name = {}
    for k, tensor in enumerate(inputs):
        name = f"{_OUTSIDE}{k}:0"
        node.input.append(name)
        inputs_by_name[name] = tensor
    definition.node.append(node)
    (new_op,) = _tf.import_nodes(made.target, definition, inputs_by_name, "")
    _tf.add_control_inputs(new_op, made.before)
    return new_op


def _after(
    made: Rewriter,
    op: tf.Operation,
    new: tf.Operation,
    divided: Sequence[tuple[int, Handles]],
) -> None:
    """Registers which results of the new op are handles, and of which variables."""
    for tensor, result in zip(op.outputs, new.outputs, strict=False):
        if tensor.dtype in (tf.resource, tf.variant):
            _tf.copy_handle_data(tensor, result)
    if op.type not in uses.LOOPS:
        return
    first_further = len(op.outputs)
    for k, handles in divided:
        count = len(handles.parts) - 1
        part_results = (
            new.outputs[k],
            *new.outputs[first_further : first_further + count],
        )
        for handle, result in zip(handles.parts, part_results, strict=True):
            _tf.copy_handle_data(handle, result)
        made.divide(op.outputs[k], Handles(handles.cut, part_results))
        first_further += count


def _body(
    op: tf.Operation,
    attribute: str,
    name: str,
    divided: Sequence[tuple[int, Handles]],
    divide: Divide,
) -> str:
    """Returns the name of a function's copy that takes variables in parts.

    Args:
        op: The op that calls it.
        attribute: The attribute that holds its name.
        name: The function's name.
        divided: Which of its arguments are partitioned, with the handles outside.
        divide: Replaces an op that uses a partitioned variable.
    """
    function = _tf.function_called(op, name)
    assert function is not None, "it was found before"
    body, results = function
    inside = _tf.new_function_graph("parts")
    _tf.copy_functions(body, inside)
    rewriter = Rewriter(body, inside, divide)
    handles_by_index = dict(divided)
    for k, tensor in enumerate(body.inputs):
        outer_tensor = handles_by_index[k].parts[0] if k in handles_by_index else tensor
        rewriter.give(tensor, _tf.add_input(inside, outer_tensor, tensor.shape))
    for k, handles in divided:
        first = rewriter.tensor(body.inputs[k])
        further_inputs = [_tf.add_input(inside, h, h.shape) for h in handles.parts[1:]]
        rewriter.divide(body.inputs[k], Handles(handles.cut, (first, *further_inputs)))
    argument_ops = {tensor.op for tensor in body.inputs}
    rewriter.add([op for op in body.get_operations() if op not in argument_ops])
    with inside.as_default():
        outputs = [_result(rewriter, tensor) for tensor in results]
        if attribute == "body":
            for k, _ in divided:
                outputs += rewriter.handles[id(body.inputs[k])].parts[1:]
    must_run = [rewriter.places[output] for output in body.control_outputs]
    return _tf.finish_function(inside, outputs, must_run)


def _result(made: Rewriter, tensor: tf.Tensor) -> tf.Tensor:
    handles = made.handles.get(id(tensor))
    return made.tensor(tensor) if handles is None else handles.parts[0]
