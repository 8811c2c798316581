# SPDX-License-Identifier: Apache-2.0
"""Copies the body of a function into another graph, where it can be changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.matching.control_flow import held


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of a function's ops inside another graph.

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
) -> Copy:
    """Copies a function's ops into the default graph, onto the arguments.

    Args:
        graph: The function's.
        outputs: What it returns.
        arguments: What takes the places of its arguments.
        scope: A name scope that is not used yet.
    """
    target = tf.compat.v1.get_default_graph()
    _tf.copy_functions(graph, target)
    given = {
        tensor.op.name: argument
        for tensor, argument in zip(graph.inputs, arguments, strict=True)
    }
    definition = tf.compat.v1.GraphDef()
    used: dict[str, tf.Tensor] = {}
    for node in graph.as_graph_def(add_shapes=True).node:
        if node.name in given:
            continue
        # Every op has a device; what it was placed with may have stayed outside.
        node.attr.pop("_class", None)
        for name in node.input:  # "x", or "^x" for what is only waited for
            source = name.removeprefix("^").partition(":")[0]
            if source in given:
                used[name if name.startswith("^") else f"{source}:0"] = given[source]
        definition.node.append(node)
    tf.graph_util.import_graph_def(definition, used, name=scope)

    def own(op: tf.Operation) -> tf.Operation:
        return target.get_operation_by_name(f"{scope}/{op.name}")

    return Copy(
        ops=[own(op) for op in graph.get_operations() if op.name not in given],
        # Results that a placeholder stands for are replaced with it, unless held.
        results=[
            given[t.op.name]
            if t.op.name in given
            else held(own(t.op).outputs[t.value_index])
            for t in outputs
        ],
        must_run=[own(op) for op in graph.control_outputs if op.name not in given],
    )
