# SPDX-License-Identifier: Apache-2.0
"""The functions that ops call: finds, creates and replaces them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import control_flow_util_v2 as _control_flow_v2
from tensorflow.python.ops import handle_data_util

from replicator._tf.choice import Nodes
from replicator._tf.ops import is_abandoned


def named(value: Any) -> Sequence[Any]:
    """Returns the functions that an attribute names: NameAttrLists, to be changed."""
    return [value.func] if value.HasField("func") else value.list.func


def called_graphs(op: tf.Operation) -> list[tuple[str, tf.Graph]]:
    """Returns (attribute, body) of each function that `op` calls, in a fixed order.

    Bodies are the Python FuncGraphs that were traced; functions that exist only in C++
    (loaded models, tf.data) are omitted. There is no public way from op to body.
    """
    bodies = []
    # Reversed: TensorFlow traces cond before body and then_branch before else_branch.
    for name, value in sorted(op.node_def.attr.items(), reverse=True):
        for function in named(value):
            body = getattr(_function(op, function.name), "graph", None)
            if body is not None:
                bodies.append((name, body))
    return bodies


def _function(op: tf.Operation, name: str) -> Any:
    """Returns the function that `op` calls by name; the public API only has the name.

    Under several tapes, TensorFlow wraps conditionals and loops in a function whose
    graph does not hold their branches and bodies: the enclosing graphs do.
    """
    graph: Any = op.graph
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return function
        graph = getattr(graph, "outer_graph", None)
    return None


def names_called(op: tf.Operation) -> list[str]:
    """Returns the names of the functions `op` calls, including those only in C++."""
    values = op.node_def.attr.values()
    return [function.name for value in values for function in named(value)]


def functions_called(op: tf.Operation) -> list[tuple[str, int]]:
    """Returns (attribute, position) of each called function that XLA does not compile.

    Functions that exist only in C++ are omitted.
    """
    positions = []
    for attribute, value in sorted(op.node_def.attr.items()):
        for position, name in enumerate(f.name for f in named(value)):
            function = _function(op, name)
            if getattr(function, "graph", None) is not None and not compiled(op, name):
                positions.append((attribute, position))
    return positions


def compiled(op: tf.Operation, name: str) -> bool:
    """Whether XLA compiles the function that `op` calls by this name."""
    function = _function(op, name)
    if function is None:
        return False
    attributes = function.cached_definition.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def function_called(op: tf.Operation, name: str) -> tuple[Any, list[tf.Tensor]] | None:
    """Returns the graph and the results of the function that `op` calls by this name.

    None if the function exists only in C++.
    """
    function = _function(op, name)
    if getattr(function, "graph", None) is None:
        return None
    count = len(function.function_type.flat_outputs)
    return function.graph, function.graph.outputs[:count]


def function_body(
    op: tf.Operation, attribute: str, position: int = 0
) -> tuple[Any, list[tf.Tensor]]:
    """Returns the graph and the results of a function that `op` calls.

    Gradients append results to the graphs of functions that exist already.
    """
    value = op.node_def.attr[attribute]
    name = value.list.func[position].name if value.list.func else value.func.name
    body = function_called(op, name)
    assert body is not None, name
    return body


def set_function(op: tf.Operation, attribute: str, position: int, name: str) -> None:
    """Makes `op` call another function of the same signature, by name."""
    functions = op.node_def.attr[attribute].list.func
    names = [function.name for function in functions]
    if names:
        names[position] = name
        op._set_func_list_attr(attribute, names)
    else:
        op._set_func_attr(attribute, name)


def has_ops(graph: tf.Graph, pattern: re.Pattern[str]) -> bool:
    """Whether a graph, those around it, or their functions have ops of such types.

    No public call lists the functions of a graph without all of their bodies.
    """
    around: Any = graph
    while around is not None:
        bodies = (f.cached_definition.node_def for f in around._functions.values())
        types = itertools.chain.from_iterable(bodies)
        if any(pattern.match(node.op) for node in types):
            return True
        if any(pattern.match(op.type) for op in around.get_operations()):
            return True
        around = getattr(around, "outer_graph", None)
    return False


def copy_functions(source: Any, target: tf.Graph) -> None:
    """Registers the functions that one graph's ops call in another graph."""
    for function in list(source._functions.values()):
        target._add_function_recursive(function)


def new_function_graph(name: str) -> Any:
    """Returns an empty graph for a function that the default graph will call.

    `tf.function` would trace a Python function, order its effects across replicas and
    wrap its results in identities; the body of a merged op is assembled as it is.
    """
    return _MergedGraph(f"{name}_{_ops.uid()}")


class _MergedGraph(tf.__internal__.FuncGraph):
    """A function graph that omits abandoned ops.

    Ops cannot be removed from a graph, and those with an effect would run.
    """

    def get_operations(self) -> list[tf.Operation]:
        """Returns the function's ops."""
        return [op for op in super().get_operations() if not is_abandoned(op)]


def add_inputs(
    graph: Any, likes: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape]
) -> list[tf.Tensor]:
    """Adds arguments to a function graph, with the dtypes and handle data of tensors.

    Args:
        graph: The graph.
        likes: A tensor like each argument.
        shapes: The arguments' shapes.
    """
    nodes = Nodes()
    for like, shape in zip(likes, shapes, strict=True):
        nodes.add("Placeholder", dtype=like.dtype, shape=tf.TensorShape(shape))
    with graph.as_default(), tf.device(None), tf.control_dependencies(None):
        arguments = [op.outputs[0] for op in nodes.finish("arguments")]
    for like, argument in zip(likes, arguments, strict=True):
        handle_data_util.copy_handle_data(like, argument)
    graph.inputs += arguments
    return arguments


def finish_function(
    graph: Any, outputs: Sequence[tf.Tensor], must_run: Sequence[tf.Operation]
) -> str:
    """Turns a graph into a function of the outer graph; returns the function's name."""
    graph.outputs = list(outputs)
    graph.structured_outputs = list(outputs)
    graph.control_outputs = list(must_run)
    return _control_flow_v2.create_new_tf_function(graph)


def capture_at_call(closure: Callable[[], Any], spec: Any) -> Any:
    """Captures `closure`'s value at each eager call in the function being traced.

    In the public API only arguments vary from call to call, and a step has none.

    Args:
        closure: Called at each call, outside of all graphs.
        spec: The tf.TypeSpec of its result.
    """
    graph = tf.compat.v1.get_default_graph()
    return graph.capture_call_time_value(closure, spec)


def capture_by_call(
    graph: Any, key: str, like: tf.Tensor, closure: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Captures the resource that `closure` returns wherever the function is called.

    `FuncGraph.capture_call_time_value` would evaluate it when the outermost function is
    called, not where this one is called from another graph.

    Args:
        graph: The graph of the function being traced.
        key: Identifies the capture within the graph.
        like: A resource of the same kind.
        closure: Called at each call, in the calling graph.
    """
    captures = graph._function_captures
    if key not in captures.by_ref_internal:
        with graph.as_default(), tf.device(None), tf.control_dependencies(None):
            placeholder = tf.compat.v1.placeholder(tf.resource, [])
        handle_data_util.copy_handle_data(like, placeholder)
        captures.add_or_replace(
            key=key,
            external=closure,
            internal=placeholder,
            tracetype=tf.TensorSpec([], tf.resource),
            is_by_ref=True,
        )
    return captures.by_ref_internal[key]
