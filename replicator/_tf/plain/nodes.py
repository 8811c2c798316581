# SPDX-License-Identifier: Apache-2.0
"""Adds fully specified ops one by one."""

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
        graph: The graph that receives the nodes, the default graph.
        definition: Complete nodes in topological order, with their devices.
        inputs: The tensors, by name ("x:0"), that nodes take from outside the
            definition.
        scope: The name scope, with the final "/".
    """
    definition.versions.CopyFrom(graph.graph_def_versions)  # unset means very old
    start = operation_count(graph)
    with tf.device(None):  # nodes have their devices
        tf.graph_util.import_graph_def(definition, input_map=inputs, name=scope)
    new = operation_count(graph) - start
    return graph.get_operations()[-new:] if new else []


class Nodes:
    """Ops that are added to the default graph together, and that no tape records.

    Otherwise they are like any new ops: subject to the current name scope, device
    functions, control dependencies and control flow context. Their names sort in the
    order in which they were added.
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
        """Records an op for `finish` to add.

        Args:
            type_: The op's type.
            inputs: Tensors, or numbers of this object's ops, meaning their first
                results.
            device: Its device; None: the device functions choose.
            **attributes: All of the op's attributes except those with a default.

        Returns:
            The op's number.
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
    """Returns the name, within the scope, of the op with this number."""
    return f"n{number:07d}"


def _set_attribute(attribute: Any, value: Any) -> None:
    """Sets a node's AttrValue."""
    if isinstance(value, tf.DType):
        attribute.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        attribute.shape.SetInParent()  # present even for a scalar, whose shape is empty
        attribute.shape.MergeFrom(value.as_proto())
    elif isinstance(value, int):
        attribute.i = value
    else:
        attribute.tensor.CopyFrom(value)
