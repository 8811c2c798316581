# SPDX-License-Identifier: Apache-2.0
"""Adds ops of which all is known, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator._tf.graphs import operation_count


def import_nodes(
    graph: tf.Graph, definition: Any, inputs: dict[str, tf.Tensor], scope: str
) -> list[tf.Operation]:
    """Adds the nodes of a GraphDef to a graph; returns their ops in order.

    Args:
        graph: Where the nodes go, the default graph.
        definition: Complete nodes, each behind its inputs, with their devices.
        inputs: By name, "x:0", what nodes are given that are not in the definition.
        scope: The name scope, with the final "/".
    """
    definition.versions.CopyFrom(graph.graph_def_versions)  # or it counts as very old
    start = operation_count(graph)
    with tf.device(None):  # nodes have their devices
        tf.graph_util.import_graph_def(definition, input_map=inputs, name=scope)
    new = operation_count(graph) - start
    return graph.get_operations()[-new:] if new else []


class Nodes:
    """Ops that are added to the default graph together, and that no tape records.

    Apart from that they are as ops that are added otherwise: in the current name scope,
    under the device functions, control dependencies and control flow. Their names sort
    as they were noted.
    """

    def __init__(self) -> None:
        self._definition = tf.compat.v1.GraphDef()
        self._inputs: list[Sequence[tf.Tensor | int]] = []

    def add(
        self,
        type_: str,
        inputs: Sequence[tf.Tensor | int] = (),
        device: str | None = None,
        **attributes: Any,
    ) -> int:
        """Notes an op.

        Args:
            type_: Its type.
            inputs: Tensors, or the number of an op of this object for its first result.
            device: Where it is; if given, no device function is asked.
            **attributes: All of the op's attributes, but for those with a default.

        Returns:
            The number of the op.
        """
        number = len(self._inputs)
        node = self._definition.node.add(op=type_, name=node_name(number))
        node.device = device or ""
        for name, value in attributes.items():
            _set_attribute(node.attr[name], value)
        self._inputs.append(inputs)
        return number

    def finish(self, name: str) -> list[tf.Operation]:
        """Adds all ops, in a name scope; returns them by number."""
        with tf.name_scope(name):
            return self._add_one_by_one()

    def _add_one_by_one(self) -> list[tf.Operation]:
        ops: list[tf.Operation] = []
        for node, inputs in zip(self._definition.node, self._inputs, strict=True):
            tensors = [ops[x].outputs[0] if isinstance(x, int) else x for x in inputs]
            ops.append(self._add_one(node, tensors))
        return ops

    def _add_one(self, node: Any, inputs: Sequence[tf.Tensor]) -> tf.Operation:
        """Adds the op of a node to the default graph."""
        if node.device:
            with tf.device(None), tf.device(node.device):
                return _create(node, inputs)
        return _create(node, inputs)


def _create(node: Any, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    graph = tf.compat.v1.get_default_graph()
    attributes = dict(node.attr)
    return graph.create_op(node.op, list(inputs), name=node.name, attrs=attributes)


def node_name(number: int) -> str:
    """Returns what the op of a number is called, in its scope."""
    return f"n{number:07d}"


def _set_attribute(attribute: Any, value: Any) -> None:
    """Sets the AttrValue of a node."""
    if isinstance(value, tf.DType):
        attribute.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        attribute.shape.SetInParent()  # a scalar's is empty
        attribute.shape.MergeFrom(value.as_proto())
    elif isinstance(value, int):
        attribute.i = value
    else:
        attribute.tensor.CopyFrom(value)
