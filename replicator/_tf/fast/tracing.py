# SPDX-License-Identifier: Apache-2.0
"""Traces a step without unused ops, and without results that wait for effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.function import trace_type as _trace_type
from tensorflow.core.function.polymorphism import function_type as _function_type
from tensorflow.python.eager.polymorphic_function import concrete_function as _concrete
from tensorflow.python.framework import auto_control_deps as _acd
from tensorflow.python.framework import func_graph as _func_graph

from replicator._tf.ops import is_abandoned

_NEEDED = (
    _acd.AutomaticControlDependencies()._independent_ops,
    _acd.AutomaticControlDependencies().ops_which_must_run,
    _concrete.ConcreteFunction.from_func_graph,
    _func_graph.func_graph_from_py_func,
    _function_type.FunctionType,
    _trace_type.from_value,
    _trace_type.InternalTracingContext,
    tf.__internal__.FuncGraph.function_captures,
)


class _Effects(_acd.AutomaticControlDependencies):
    """Replaces TensorFlow's automatic ordering of effects by a given function."""

    def __init__(self, order: Callable[..., list[tf.Operation]]) -> None:
        super().__init__()
        self._order = order
        self._n_operations: int

    def __exit__(self, *exc_info: Any) -> None:
        ops = self._graph.get_operations()[self._n_operations :]
        self._n_operations += len(ops)  # leaves none for TensorFlow to order
        super().__exit__(*exc_info)
        if exc_info[0] is None:
            live_ops = [op for op in ops if not is_abandoned(op)]
            must_run = self._order(live_ops, set(self._independent_ops))
            self.ops_which_must_run.update(must_run)


def trace(
    build: Callable[[], Any],
    order: Callable[[Sequence[tf.Operation], set[tf.Operation]], list[tf.Operation]],
    only_step: bool = True,
) -> Any:
    """Traces a function without arguments; returns its ConcreteFunction.

    Unlike a tf.function's, its results do not wait for its effects, which would cost a
    pass through one device after the other once the step is done; a call waits for all
    effects anyway. A tf.function's treatment of effects can only be switched off
    publicly as a whole, takes longer than all of Replicator's passes, and keeps all ops
    of the graph in the function, used or not.

    Args:
        build: Adds the ops; returns the results.
        order: Takes all ops and those set to run independently; orders the effects of
            the others and returns the ops that must run.
        only_step: Whether the function contains nothing but a step.
    """

    def traced() -> Any:
        with _Effects(order) as effects:
            returned = build()
        graph.control_outputs.extend(effects.ops_which_must_run)
        graph.collective_manager_ids_used = effects.collective_manager_ids_used
        return returned

    graph = _StepGraph("step")
    graph.only_step = only_step
    _func_graph.func_graph_from_py_func(
        graph.name, traced, (), {}, func_graph=graph, add_control_dependencies=False
    )
    _leave_out_unused(graph)
    returned = _trace_type.from_value(
        graph.structured_outputs, _trace_type.InternalTracingContext()
    )
    type_ = _function_type.FunctionType(
        (), graph.function_captures.capture_types, return_annotation=returned
    )
    return _concrete.ConcreteFunction.from_func_graph(
        graph, type_, {}, shared_func_graph=False
    )


class _StepGraph(tf.__internal__.FuncGraph):
    """A function graph that can omit ops once it is complete."""

    used: Sequence[tf.Operation] | None = None
    only_step = True

    def get_operations(self) -> list[tf.Operation]:
        """Returns the function's ops."""
        return super().get_operations() if self.used is None else list(self.used)


def is_step(graph: tf.Graph) -> bool:
    """Whether a graph was traced by `trace`, with nothing but a step in it."""
    return isinstance(graph, _StepGraph) and graph.only_step


def _leave_out_unused(graph: Any) -> None:
    """Omits the ops that no result or effect of a function needs, if any was abandoned.

    Where replicas share variables, each builds all updates, and only one replica's are
    used: TensorFlow would spend much time on each op before it prunes them. Without
    abandoned ops the search costs more than it saves.

    Args:
        graph: A step's graph, complete.
    """
    ops = graph.get_operations()
    if not any(map(is_abandoned, ops)):
        return
    stack = [*graph.control_outputs, *(tensor.op for tensor in graph.outputs)]
    used = {*stack, *(tensor.op for tensor in graph.inputs)}
    while stack:
        op = stack.pop()
        for source in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
            if source not in used:
                used.add(source)
                stack.append(source)
    graph.used = [op for op in ops if op in used]
