# SPDX-License-Identifier: Apache-2.0
"""Adds loops and conditionals of TensorFlow 2 that need no gradients any more.

`tf.while_loop` and `tf.cond` prepare for gradients, nest structures and add identities,
which takes most of the time of building a small body. A graph that contains its
gradients already needs none of that. What they add depends on a public switch, too,
which applies to the whole process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps as _acd
from tensorflow.python.framework import auto_control_deps_utils as _acd_utils
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import control_flow_util_v2 as _control_flow_v2
from tensorflow.python.ops import control_flow_v2_func_graphs as _graphs

from replicator._tf.functions import add_inputs, finish_function
from replicator._tf.ops import copy_handle_data, set_read_only_inputs


def while_loop(
    condition: Callable[..., tf.Tensor],
    body: Callable[..., Sequence[tf.Tensor]],
    first: Sequence[tf.Tensor],
    shapes: Sequence[tf.TensorShape],
    parallel_iterations: int,
) -> list[tf.Tensor]:
    """Adds a loop.

    Args:
        condition: Called with the values that the loop carries: whether to go on.
        body: Called with these, returns those of the next iteration.
        first: Those of the first iteration.
        shapes: Their static shapes in all iterations.
        parallel_iterations: How many iterations may run at the same time.

    Returns:
        The values after the last iteration.
    """
    count = len(first)
    condition_graph = _new_graph(_graphs.WhileCondFuncGraph, "while_cond")
    body_graph = _new_graph(_graphs.WhileBodyFuncGraph, "while_body")
    for graph in (condition_graph, body_graph):
        add_inputs(graph, first, shapes)
    goes_on, first_effects = _build_body(
        condition_graph, lambda: [condition(*condition_graph.inputs[:count])]
    )
    next_values, effects = _build_body(
        body_graph, lambda: body(*body_graph.inputs[:count])
    )
    outside = _share_captures([condition_graph, body_graph], count)
    next_values += body_graph.inputs[count:]
    kind = (
        tf.raw_ops.While
        if _has_state(condition_graph, body_graph)
        else tf.raw_ops.StatelessWhile
    )
    with _after([condition_graph, body_graph]):
        op = add_lowered(
            kind,
            input=[*first, *outside],
            cond=finish_function(condition_graph, goes_on, first_effects),
            body=finish_function(body_graph, next_values, effects),
            output_shapes=[*shapes, *(t.shape for t in outside)],
            parallel_iterations=parallel_iterations,
        )
    return _finished(op, [body_graph, condition_graph])[:count]


def branch(
    selector: tf.Tensor, branches: Sequence[Callable[[], Sequence[tf.Tensor]]]
) -> list[tf.Tensor]:
    """Adds a conditional.

    Args:
        selector: True selects the first of two branches; or the number of a branch.
        branches: Each returns at least one tensor; all return the same dtypes.

    Returns:
        Those of the branch that is taken.
    """
    graphs = [_new_graph(_graphs.CondBranchFuncGraph, "branch") for _ in branches]
    bodies = [_build_body(*pair) for pair in zip(graphs, branches, strict=True)]
    results = [outputs for outputs, _ in bodies]
    outside = _share_captures(graphs, 0)
    names = [finish_function(g, *body) for g, body in zip(graphs, bodies, strict=True)]
    shapes = [_common_shape(column) for column in zip(*results, strict=True)]
    dtypes, has_state = [t.dtype for t in results[0]], _has_state(*graphs)
    is_case = selector.dtype != tf.bool
    with _after(graphs):
        op = add_conditional(
            selector, is_case, names, outside, dtypes, shapes, has_state=has_state
        )
    return _finished(op, graphs)


def add_conditional(
    selector: Any,
    is_case: bool,
    branches: Sequence[str],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[tf.TensorShape],
    has_state: bool,
) -> tf.Operation:
    """Adds the op of a conditional.

    Args:
        selector: The number of a branch; or what is true for the first of two.
        is_case: Whether it is a number.
        branches: The names of functions of the inputs.
        inputs: The inputs.
        dtypes: Of the results.
        shapes: Their static shapes.
        has_state: Whether one of the functions has state.
    """
    more: dict[str, Any] = {"input": inputs, "Tout": dtypes, "output_shapes": shapes}
    if is_case:
        kind = tf.raw_ops.Case if has_state else tf.raw_ops.StatelessCase
        return add_lowered(kind, branch_index=selector, branches=branches, **more)
    kind = tf.raw_ops.If if has_state else tf.raw_ops.StatelessIf
    pair = dict(zip(("then_branch", "else_branch"), branches, strict=True))
    return add_lowered(kind, cond=selector, **pair, **more)


def add_lowered(kind: Callable[..., Any], **arguments: Any) -> tf.Operation:
    """Adds a conditional or a loop that the runtime inlines, as it does TensorFlow's.

    Args:
        kind: Adds the op, from tf.raw_ops.
        **arguments: Its arguments.
    """
    kind(**arguments)  # returns its results, of which it may have none
    op: tf.Operation = tf.compat.v1.get_default_graph().get_operations()[-1]
    _control_flow_v2.maybe_set_lowering_attr(op)
    return op


def _new_graph(kind: type, name: str) -> Any:
    """Returns an empty graph for a body, inside the default graph."""
    outer: Any = tf.compat.v1.get_default_graph()
    return kind(f"{name}_{_ops.uid()}", collections=outer._collections)


def _build_body(
    graph: Any, build: Callable[[], Sequence[tf.Tensor]]
) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Builds a body; returns its results, and what else must run.

    Effects are ordered by themselves if they are in the graph around it. Reading is
    none: what needs a value waits for it.
    """
    is_ordered = graph.outer_graph._add_control_dependencies
    order = _acd.AutomaticControlDependencies() if is_ordered else None
    with graph.as_default(), order or contextlib.nullcontext():
        results = [graph.capture(tensor) for tensor in build()]
        ops = graph.get_operations()
        writes = any(op._is_stateful and op.type != "ReadVariableOp" for op in ops)
        if order is None or not writes:
            return results, []
        results = [order.mark_as_return(tensor) for tensor in results]
    return results, list(order.ops_which_must_run)


def _share_captures(graphs: Sequence[Any], count: int) -> list[tf.Tensor]:
    """Makes every tensor that some graph captures an argument of all graphs.

    Args:
        graphs: Bodies of one op.
        count: The number of their other arguments.

    Returns:
        The tensors outside, for the arguments after these.
    """
    columns: dict[Any, tuple[tf.Tensor, dict[int, tf.Tensor]]] = {}
    for n, graph in enumerate(graphs):
        for outside, inside in graph.captures:
            columns.setdefault(id(outside), (outside, {}))[1][n] = inside
        for closure, inside in zip(
            graph.deferred_external_captures,
            graph.deferred_internal_captures,
            strict=True,
        ):
            columns[id(inside)] = (closure(), {n: inside})
    outside = [tensor for tensor, _ in columns.values()]
    for n, graph in enumerate(graphs):
        missing = [t for t, inside in columns.values() if n not in inside]
        del graph.inputs[count:]
        new = iter(add_inputs(graph, missing, [t.shape for t in missing]))
        del graph.inputs[count:]
        graph.inputs += [
            inside[n] if n in inside else next(new) for _, inside in columns.values()
        ]
    return outside


def _has_state(*graphs: Any) -> bool:
    return any(op._is_stateful for graph in graphs for op in graph.get_operations())


def _common_shape(tensors: Sequence[tf.Tensor]) -> tf.TensorShape:
    shape = tensors[0].shape
    for tensor in tensors[1:]:
        shape = shape.most_specific_compatible_shape(tensor.shape)
    return shape


def _after(graphs: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Lets the op of some functions come after what these wait for."""
    return tf.control_dependencies(
        [op for graph in graphs for op in graph.function_captures.control]
    )


def _finished(op: tf.Operation, graphs: Sequence[Any]) -> list[tf.Tensor]:
    """Says of an op what follows from its functions; returns its results.

    Args:
        op: The op.
        graphs: The functions' graphs, first of one that returns such results.
    """
    _control_flow_v2.maybe_propagate_compile_time_consts_in_xla(op)
    first = len(op.inputs) - len(graphs[0].inputs)
    read_only = [
        set(_acd_utils.get_read_only_resource_input_indices_graph(g)) for g in graphs
    ]
    set_read_only_inputs(op, [first + k for k in sorted(set.intersection(*read_only))])
    for tensor, like in zip(op.outputs, graphs[0].outputs, strict=True):
        if tensor.dtype in (tf.resource, tf.variant):
            copy_handle_data(like, tensor)
    return list(op.outputs)
