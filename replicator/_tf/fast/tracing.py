# SPDX-License-Identifier: Apache-2.0
"""Traces a step with what it needs only, and with effects that no result waits for."""

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
    """Leaves what to do about effects to a function that is given."""

    def __init__(self, order: Callable[..., list[tf.Operation]]) -> None:
        super().__init__()
        self._order = order
        self._n_operations: int

    def __exit__(self, *about: Any) -> None:
        ops = self._graph.get_operations()[self._n_operations :]
        self._n_operations += len(ops)  # none is left for TensorFlow
        super().__exit__(*about)
        if about[0] is None:
            kept = [op for op in ops if not is_abandoned(op)]
            must_run = self._order(kept, set(self._independent_ops))
            self.ops_which_must_run.update(must_run)


def trace(
    build: Callable[[], Any],
    order: Callable[[Sequence[tf.Operation], set[tf.Operation]], list[tf.Operation]],
    alone: bool = True,
) -> Any:
    """Traces a function without arguments; returns its ConcreteFunction.

    Unlike those of a tf.function, its results do not wait for its effects, which would
    take them through one device after the other once the step is done. A call waits for
    all of them anyway. What a tf.function does about effects is open to the public only
    as a whole, and takes longer than all of Replicator's passes; and it takes all ops
    of its graph into the function, used or not.

    Args:
        build: Adds the ops; returns the results.
        order: Puts the effects among all ops in order, but for those that were said to
            run independently; returns the ops that must run.
        alone: Whether it holds nothing but a step.
    """

    def traced() -> Any:
        with _Effects(order) as effects:
            returned = build()
        graph.control_outputs.extend(effects.ops_which_must_run)
        graph.collective_manager_ids_used = effects.collective_manager_ids_used
        return returned

    graph = _StepGraph("step")
    graph.alone = alone
    _func_graph.func_graph_from_py_func(
        graph.name, traced, (), {}, func_graph=graph, add_control_dependencies=False
    )
    leave_out_unused(graph)
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
    """A function graph out of which ops can be left when it is complete."""

    used: Sequence[tf.Operation] | None = None
    alone = True

    def get_operations(self) -> list[tf.Operation]:
        """Returns the ops that the function consists of."""
        return super().get_operations() if self.used is None else list(self.used)


def is_step(graph: tf.Graph) -> bool:
    """Whether a graph is a function's that `trace` traces, with nothing but a step."""
    return isinstance(graph, _StepGraph) and graph.alone


def leave_out_unused(graph: Any) -> None:
    """Leaves out ops that no result and no effect of a function needs, if some must be.

    Where replicas share variables, each has built all updates, and only one of the
    results is used: TensorFlow would do much for each op before it leaves them out.
    Where none was abandoned, going through all of them takes more than it saves.

    Args:
        graph: That of a step, complete.
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
