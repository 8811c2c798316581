# SPDX-License-Identifier: Apache-2.0
"""Copies ops of one graph into another, as often as there are replicas.

A copy is an import in C++: of nodes that are complete, under a name scope, with other
tensors in the places of those that are not copied. The ops that an op of the original
became are found by the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir.kinds import kind_of

_OUTSIDE = "AutoDist-outside"  # where what nodes are given from elsewhere is named
Places = dict[tf.Operation, tf.Operation]  # what an op of the original has become


def of(places: Mapping[tf.Operation, tf.Operation], tensor: tf.Tensor) -> tf.Tensor:
    """Returns what a tensor of the original has become."""
    return places[tensor.op].outputs[tensor.value_index]


class Stamp:
    """Ops of a graph, ready to be copied into another one.

    Args:
        graph: Where they are.
        ops: The ops, in order.
    """

    def __init__(self, graph: tf.Graph, ops: Sequence[tf.Operation]) -> None:
        self.ops = list(ops)
        inside = set(ops)
        self.outside: list[tf.Tensor] = []
        self._waits: list[tuple[int, tf.Operation]] = []
        known: dict[int, int] = {}
        by_name = {op.name: n for n, op in enumerate(self.ops)}
        nodes: list[Any] = [None] * len(self.ops)
        if self.ops:
            for node in graph.as_graph_def(add_shapes=True).node:
                if node.name in by_name:
                    nodes[by_name[node.name]] = node
        self._definition = tf.compat.v1.GraphDef()
        for n, (op, node) in enumerate(zip(self.ops, nodes, strict=True)):
            node.attr.pop("_class", None)  # every op is placed by itself
            del node.input[:]
            for tensor in op.inputs:
                if tensor.op in inside:
                    node.input.append(tensor.name)
                    continue
                k = known.setdefault(id(tensor), len(known))
                if k == len(self.outside):
                    self.outside.append(tensor)
                node.input.append(f"{_OUTSIDE}{k}:0")
            for source in op.control_inputs:
                if source in inside:
                    node.input.append(f"^{source.name}")
                else:
                    self._waits.append((n, source))
            self._definition.node.append(node)
        self._calling = [n for n, op in enumerate(self.ops) if kind_of(op).calls]
        self._handles = [
            (n, k)
            for n, op in enumerate(self.ops)
            for k, tensor in enumerate(op.outputs)
            if tensor.dtype in (tf.resource, tf.variant)
        ]

    def press(
        self,
        graph: tf.Graph,
        scope: str,
        given: Callable[[tf.Tensor], tf.Tensor],
        placed: Callable[[tf.Operation], str],
        others: Mapping[tf.Operation, tf.Operation],
        called: Callable[[tf.Operation, str], str] | None = None,
    ) -> Places:
        """Adds a copy to a graph; returns what each op has become.

        Args:
            graph: Where the copy goes.
            scope: Its name scope, with the final "/", or "".
            given: Returns what is in the place of a tensor that is not copied.
            placed: Returns the device of an op's copy.
            others: What ops have become that are not copied here.
            called: Returns the function in the place of one that an op calls; None: ops
                call what they called.
        """
        if not self.ops:
            return {}
        definition = tf.compat.v1.GraphDef()
        definition.CopyFrom(self._definition)
        for node, op in zip(definition.node, self.ops, strict=True):
            node.device = placed(op)
            if "frame_name" in node.attr:  # one loop of TensorFlow 1 for each copy
                frame = node.attr["frame_name"]
                frame.s = scope.encode() + frame.s
        if called is not None:
            for n in self._calling:
                _call(definition.node[n], self.ops[n], called)
        inputs = {
            f"{_OUTSIDE}{k}:0": given(tensor) for k, tensor in enumerate(self.outside)
        }
        with graph.as_default():
            new = _tf.import_nodes(graph, definition, inputs, scope)
        by_name = {op.name: op for op in new}
        places = {op: by_name[scope + op.name] for op in self.ops}
        for n, source in self._waits:
            if source in others:
                _tf.add_control_inputs(places[self.ops[n]], [others[source]])
        for n, k in self._handles:
            op = self.ops[n]
            _tf.copy_handle_data(op.outputs[k], places[op].outputs[k])
        for op, copy in places.items():
            _tf.copy_line(op, copy)
        return places


def _call(
    node: Any, op: tf.Operation, called: Callable[[tf.Operation, str], str]
) -> None:
    """Lets a copy of an op call other functions."""
    for value in node.attr.values():
        if value.HasField("func"):
            value.func.name = called(op, value.func.name)
        for function in value.list.func:
            function.name = called(op, function.name)
