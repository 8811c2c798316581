# SPDX-License-Identifier: Apache-2.0
"""The functions that ops call: finds their bodies, and makes and exchanges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import control_flow_util_v2 as _control_flow_v2
from tensorflow.python.ops import handle_data_util

from replicator._tf.ops import is_abandoned


def called_graphs(op: tf.Operation) -> list[tuple[str, tf.Graph]]:
    """Returns (attribute, body) of each function that `op` calls, in a fixed order.

    Bodies are the Python FuncGraphs that were traced; functions that only exist in C++
    (loaded models, tf.data) are left out. There is no public way from op to body.
    """
    found = []
    # Backwards: TensorFlow traces cond before body and then_branch before else_branch.
    for name, value in sorted(op.node_def.attr.items(), reverse=True):
        names = [value.func.name] if value.HasField("func") else []
        names += [function.name for function in value.list.func]
        for function in names:
            body = getattr(_function(op, function), "graph", None)
            if body is not None:
                found.append((name, body))
    return found


def _function(op: tf.Operation, name: str) -> Any:
    """Returns the function that `op` calls by name; the public API only has the name.

    Where several tapes watch, TensorFlow wraps conditionals and loops in a function of
    their own, whose graph does not know their branches and bodies: those around do.
    """
    graph: Any = op.graph
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return function
        graph = getattr(graph, "outer_graph", None)
    return None


def count_functions(op: tf.Operation) -> int:
    """Returns how many functions `op` calls, those that only exist in C++ included."""
    attributes = op.node_def.attr.values()
    return sum(value.HasField("func") + len(value.list.func) for value in attributes)


def functions_called(op: tf.Operation) -> list[tuple[str, int]]:
    """Returns (attribute, position) of what an op calls and TensorFlow runs as it is.

    Left out is what XLA compiles, and what only exists in C++.
    """
    found = []
    for attribute, value in sorted(op.node_def.attr.items()):
        names = [f.name for f in value.list.func]
        names += [value.func.name] if value.HasField("func") else []
        for position, name in enumerate(names):
            function = _function(op, name)
            if getattr(function, "graph", None) is not None and not compiled(op, name):
                found.append((attribute, position))
    return found


def compiled(op: tf.Operation, name: str) -> bool:
    """Whether XLA compiles a function that `op` calls by name."""
    function = _function(op, name)
    if function is None:
        return False
    attributes = function.cached_definition.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def function_called(op: tf.Operation, name: str) -> tuple[Any, list[tf.Tensor]] | None:
    """Returns the graph of a function that `op` calls by name, and its results.

    None if the function only exists in C++.
    """
    function = _function(op, name)
    if getattr(function, "graph", None) is None:
        return None
    count = len(function.function_type.flat_outputs)
    return function.graph, function.graph.outputs[:count]


def function_body(
    op: tf.Operation, attribute: str, position: int = 0
) -> tuple[Any, list[tf.Tensor]]:
    """Returns the graph of a function that `op` calls, and its results.

    Gradients add results to the graphs of functions that exist already, at their ends.
    """
    value = op.node_def.attr[attribute]
    name = value.list.func[position].name if value.list.func else value.func.name
    found = function_called(op, name)
    assert found is not None, name
    return found


def set_function(op: tf.Operation, attribute: str, position: int, name: str) -> None:
    """Lets `op` call another function, by its name, of the same arguments."""
    functions = op.node_def.attr[attribute].list.func
    names = [function.name for function in functions]
    if names:
        names[position] = name
        op._set_func_list_attr(attribute, names)
    else:
        op._set_func_attr(attribute, name)


def copy_functions(source: Any, target: tf.Graph) -> None:
    """Makes the functions that ops of one graph call known to another."""
    for function in list(source._functions.values()):
        target._add_function_recursive(function)


def new_function_graph(name: str) -> Any:
    """Returns an empty graph of a function that the default graph will call.

    `tf.function` would trace a Python function, order its effects across replicas and
    put identities around its results; the body of a merged op is put together as it is.
    """
    return _MergedGraph(f"{name}_{_ops.uid()}")


class _MergedGraph(tf.__internal__.FuncGraph):
    """A function graph out of which ops can be left.

    Ops cannot be removed from a graph, and those that have an effect would run.
    """

    def get_operations(self) -> list[tf.Operation]:
        """Returns the ops that the function consists of."""
        return [op for op in super().get_operations() if not is_abandoned(op)]


def add_input(graph: Any, like: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Adds an argument to a function graph, with what is known of `like`'s resource."""
    with graph.as_default(), tf.device(None):
        argument = tf.compat.v1.placeholder(like.dtype, shape)
    handle_data_util.copy_handle_data(like, argument)
    graph.inputs.append(argument)
    return argument


def finish_function(
    graph: Any, outputs: Sequence[tf.Tensor], must_run: Sequence[tf.Operation]
) -> str:
    """Makes a function of a graph, adds it to the outer graph and returns its name."""
    graph.outputs = list(outputs)
    graph.structured_outputs = list(outputs)
    graph.control_outputs = list(must_run)
    return _control_flow_v2.create_new_tf_function(graph)


def capture_at_call(closure: Callable[[], Any], spec: Any) -> Any:
    """Returns what stands for the value that `closure` gives at each eager call.

    In the function graph being traced. Of the public API, only arguments of a function
    change from call to call, and a step has none.

    Args:
        closure: Called for each call, outside of all graphs.
        spec: The tf.TypeSpec of what it returns.
    """
    graph = tf.compat.v1.get_default_graph()
    return graph.capture_call_time_value(closure, spec)


def capture_by_call(
    graph: Any, key: str, like: tf.Tensor, closure: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Returns the resource that `closure` gives whenever the function is called.

    `FuncGraph.capture_call_time_value` would ask it when the outermost function is
    called, and not where this one is called in the graph of another.

    Args:
        graph: The graph of the function, which is being traced.
        key: Tells its captures apart.
        like: Such a resource.
        closure: Called for each call, in the graph around.
    """
    captures = graph._function_captures
    if key not in captures.by_ref_internal:
        with graph.as_default(), tf.device(None), tf.control_dependencies(None):
            inside = tf.compat.v1.placeholder(tf.resource, [])
        handle_data_util.copy_handle_data(like, inside)
        captures.add_or_replace(
            key=key,
            external=closure,
            internal=inside,
            tracetype=tf.TensorSpec([], tf.resource),
            is_by_ref=True,
        )
    return captures.by_ref_internal[key]
