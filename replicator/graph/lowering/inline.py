# SPDX-License-Identifier: Apache-2.0
"""Copies a function's body into another graph, where it can be changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import functions
from replicator.graph.matching.control_flow import identity_if_rewired


@dataclasses.dataclass(frozen=True)
class InlinedFunction:
    """The copies of a function's ops in another graph.

    Attributes:
        ops: The ops, in the order in which the user built them.
        results: What the function returns.
        must_run: The ops that run for their effects.
    """

    ops: list[tf.Operation]
    results: list[tf.Tensor]
    must_run: list[tf.Operation]


def copy(
    graph: Any,
    outputs: Sequence[tf.Tensor],
    arguments: Sequence[tf.Tensor],
    scope: str,
) -> InlinedFunction:
    """Copies a function's ops into the default graph, applied to the arguments.

    Args:
        graph: The function's graph.
        outputs: What it returns.
        arguments: Tensors that replace its arguments.
        scope: An unused name scope.
    """
    target = tf.compat.v1.get_default_graph()
    functions.copy_functions(graph, target)
    argument_of = {
        tensor.op.name: argument
        for tensor, argument in zip(graph.inputs, arguments, strict=True)
    }
    definition = tf.compat.v1.GraphDef()
    input_map: dict[str, tf.Tensor] = {}
    for node in graph.as_graph_def(add_shapes=True).node:
        if node.name in argument_of:
            continue
        # Colocation may name ops that are not copied; every op has a device anyway.
        node.attr.pop("_class", None)
        for name in node.input:  # "x", or "^x" for a control input
            source = name.removeprefix("^").partition(":")[0]
            if source in argument_of:
                input_map[name if name.startswith("^") else f"{source}:0"] = (
                    argument_of[source]
                )
        definition.node.append(node)
    tf.graph_util.import_graph_def(definition, input_map, name=scope)

    def copy_of(op: tf.Operation) -> tf.Operation:
        return target.get_operation_by_name(f"{scope}/{op.name}")

    return InlinedFunction(
        ops=[
            copy_of(op) for op in graph.get_operations() if op.name not in argument_of
        ],
        # Rewiring a placeholder would also replace it among the results.
        results=[
            argument_of[t.op.name]
            if t.op.name in argument_of
            else identity_if_rewired(copy_of(t.op).outputs[t.value_index])
            for t in outputs
        ],
        must_run=[
            copy_of(op) for op in graph.control_outputs if op.name not in argument_of
        ],
    )
