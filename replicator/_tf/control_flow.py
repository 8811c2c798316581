# SPDX-License-Identifier: Apache-2.0
"""Control flow: which construct encloses the ops being built, and how to add to it."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as _graphs
from tensorflow.python.ops import while_v2 as _while_v2
from tensorflow.python.ops.control_flow_v2_func_graphs import (
    ControlFlowFuncGraph as _ControlFlowFuncGraph,
)

from replicator._tf.traces import TraceContext


def is_compiled(graph: tf.Graph) -> bool:
    """Whether XLA compiles the function to which `graph` belongs."""
    context = graph._get_control_flow_context()
    while isinstance(context, TraceContext):
        context = context.outer_context
    return context is not None and context.IsXLAContext()


def is_loop_gradient(graph: Any) -> bool:
    """Whether a graph is the body of a loop that is the gradient of another loop.

    Such a body returns everything it captures, and captures in its own way; nothing
    public says which graphs are bodies.
    """
    return isinstance(graph, _while_v2._WhileBodyGradFuncGraph)


def compiled_function(graph: Any, outermost: tf.Graph) -> Any:
    """Returns the function that ops of `graph` belong to, if XLA compiles it.

    Such a function is traced once for all keys of `separate_traces`: only the innermost
    XLA context counts, and each call makes a new one that does not force a retrace.

    Args:
        graph: Where ops are being added; may be a branch or the body of a loop.
        outermost: An enclosing graph, at which the search ends.

    Returns:
        The function's graph, inside `outermost`, or None.
    """
    function = graph
    while function is not outermost and isinstance(function, _ControlFlowFuncGraph):
        function = function.outer_graph
    outer = function
    while outer is not None and outer is not outermost:
        outer = getattr(outer, "outer_graph", None)
        if outer is not None and is_compiled(outer):
            return function
    return None


def around_loops(graph: Any) -> Any:
    """Returns the graph around the outermost loop that contains `graph`, or None.

    The public API builds TensorFlow 2 loops, but does not say what is inside one.
    """
    outermost = None
    while graph is not None:
        outer = getattr(graph, "outer_graph", None)
        if isinstance(graph, (_graphs.WhileBodyFuncGraph, _graphs.WhileCondFuncGraph)):
            outermost = outer
        graph = outer
    return outermost


def in_vectorized_body() -> bool:
    """Whether ops are added to a body that tf.vectorized_map or a jacobian vectorizes.

    The public API does not say so. The body is traced into the graph at hand, in a name
    scope of its own.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if _VECTORIZED.search(graph.get_name_scope()):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


_VECTORIZED = re.compile(r"(^|/)loop_body(_\d+)?(/|$)")
