# SPDX-License-Identifier: Apache-2.0
"""Copies ops of one graph into another, once per replica.

A copy is an import in C++ of complete nodes under a name scope, with other tensors
substituted for inputs that are not copied. Copies are looked up by the original op.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir.kinds import kind_of

_OUTSIDE = "AutoDist-outside"  # scope of the names that stand for tensors not copied
Places = dict[tf.Operation, tf.Operation]  # maps an op of the original to its copy


def of(places: Mapping[tf.Operation, tf.Operation], tensor: tf.Tensor) -> tf.Tensor:
    """Returns the copy of a tensor of the original."""
    return places[tensor.op].outputs[tensor.value_index]


class Stamp:
    """Ops of a graph, ready to be copied into another one.

    Args:
        graph: The graph of the ops.
        ops: The ops, in order.
    """

    def __init__(self, graph: tf.Graph, ops: Sequence[tf.Operation]) -> None:
        self.ops = list(ops)
        inside = set(ops)
        self.outside: list[tf.Tensor] = []
        self._waits: list[tuple[tf.Operation, tf.Operation]] = []
        input_numbers: dict[int, int] = {}
        by_name = {op.name: n for n, op in enumerate(self.ops)}
        nodes: list[Any] = [None] * len(self.ops)
        if self.ops:
            for node in graph.as_graph_def(add_shapes=True).node:
                if node.name in by_name:
                    nodes[by_name[node.name]] = node
        self._definition = tf.compat.v1.GraphDef()
        for op, node in zip(self.ops, nodes, strict=True):
            node.attr.pop("_class", None)  # every op is placed by itself
            del node.input[:]
            for tensor in op.inputs:
                if tensor.op in inside:
                    node.input.append(tensor.name)
                    continue
                k = input_numbers.setdefault(id(tensor), len(input_numbers))
                if k == len(self.outside):
                    self.outside.append(tensor)
                node.input.append(f"{_OUTSIDE}{k}:0")
            for source in op.control_inputs:
                if source in inside:
                    node.input.append(f"^{source.name}")
                else:
                    self._waits.append((op, source))
            self._definition.node.append(node)
        # Ops with control inputs among the copied ops.
        self._ordered = [
            op
            for op in self.ops
            if any(source_op in inside for source_op in op.control_inputs)
        ]
        self._calling = [op for op in self.ops if kind_of(op).calls]
        self._handles = [
            (op, k)
            for op in self.ops
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
        without: Collection[tf.Operation] = (),
    ) -> Places:
        """Adds a copy to a graph; returns the copy of each op.

        Args:
            graph: Where the copy goes.
            scope: Its name scope, with the final "/", or "".
            given: Returns the substitute for a tensor that is not copied.
            placed: Returns the device of an op's copy.
            others: The copies of ops that are not copied here.
            called: Returns the name of the function that a copy calls in place of the
                original's; None: the same.
            without: Ops to leave out this time, whose results nothing uses.
        """
        definition, nodes = self._defined(without)
        if not nodes:
            return {}
        for op, node in nodes.items():
            node.device = placed(op)
            if "frame_name" in node.attr:  # a TensorFlow 1 loop per copy
                frame = node.attr["frame_name"]
                frame.s = scope.encode() + frame.s
        if called is not None:
            for op in self._calling:
                _call(nodes[op], op, called)
        inputs = {
            f"{_OUTSIDE}{k}:0": given(tensor) for k, tensor in enumerate(self.outside)
        }
        with graph.as_default():
            new_ops = _tf.import_nodes(graph, definition, inputs, scope)
        places = _by_name(nodes, new_ops, scope)
        for op, source in self._waits:
            if source in others and op in places:
                _tf.add_control_inputs(places[op], [others[source]])
        for op, k in self._handles:
            if op in places:
                _tf.copy_handle_data(op.outputs[k], places[op].outputs[k])
        for op, copy in places.items():
            _tf.copy_line(op, copy)
        return places

    def _defined(
        self, without: Collection[tf.Operation]
    ) -> tuple[Any, dict[tf.Operation, Any]]:
        """Returns the nodes of all ops but some, also by op."""
        definition = tf.compat.v1.GraphDef()
        if not without:
            definition.CopyFrom(self._definition)
            return definition, dict(zip(self.ops, definition.node, strict=True))
        pairs = zip(self.ops, self._definition.node, strict=True)
        kept_pairs = [(op, node) for op, node in pairs if op not in without]
        definition.node.extend(node for _, node in kept_pairs)
        nodes = {op: definition.node[n] for n, (op, _) in enumerate(kept_pairs)}
        names = {f"^{op.name}" for op in without}
        for op in self._ordered:
            node = nodes.get(op)
            if node is not None and not names.isdisjoint(node.input):
                inputs = [name for name in node.input if name not in names]
                node.ClearField("input")
                node.input.extend(inputs)
        return definition, nodes


def _call(
    node: Any, op: tf.Operation, called: Callable[[tf.Operation, str], str]
) -> None:
    """Makes the node of a copy call other functions."""
    for value in node.attr.values():
        if value.HasField("func"):
            value.func.name = called(op, value.func.name)
        for function in value.list.func:
            function.name = called(op, function.name)


def _by_name(
    ops: Iterable[tf.Operation], copies: Sequence[tf.Operation], scope: str
) -> dict[tf.Operation, tf.Operation]:
    """Returns the copy of each op.

    An op gets another name, loss_1 for loss, if the graph already has names that begin
    with its own: TensorFlow allows loss before loss/total, but not after it.

    Args:
        ops: The ops that were copied.
        copies: Their copies, maybe in another order.
        scope: The name scope of the copies, with the final "/", or "".
    """
    by_name = {copy.name: copy for copy in copies}
    places = {
        op: by_name.pop(scope + op.name) for op in ops if scope + op.name in by_name
    }
    for op in ops:
        if op not in places:
            name = next(n for n in by_name if _NUMBER.sub("", n) == scope + op.name)
            places[op] = by_name.pop(name)
    return places


_NUMBER = re.compile(r"_[0-9]+\Z")
