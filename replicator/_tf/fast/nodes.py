# SPDX-License-Identifier: Apache-2.0
"""Adds fully specified ops: many at once, or a single one with less Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session as _c_api
from tensorflow.python.framework import c_api_util as _c_api_util
from tensorflow.python.framework import importer as _importer

from replicator._tf.graphs import operation_count
from replicator._tf.ops import add_control_inputs
from replicator._tf.plain import nodes as plain

_NEEDED = (
    _c_api.TF_DeleteBuffer,
    _c_api.TF_GraphImportGraphDefWithResults,
    _c_api.TF_NewBufferFromString,
    _c_api_util.ScopedTFImportGraphDefOptions,
    _c_api_util.ScopedTFImportGraphDefResults,
    _importer._PopulateTFImportGraphDefOptions,
    tf.Graph._apply_device_functions,
    tf.Graph._c_graph,
    tf.Graph._create_op_from_tf_operation,
    tf.Graph._create_op_internal,
    tf.Graph._current_control_dependencies,
    tf.Graph._get_control_flow_context,
    tf.Graph._mutation_lock,
    tf.Graph.new_operations,
    tf.Operation._control_flow_post_processing,
    tf.Operation._set_device,
)


def import_nodes(
    graph: tf.Graph, definition: Any, inputs: dict[str, tf.Tensor], scope: str
) -> list[tf.Operation]:
    """Adds the nodes of a GraphDef to a graph; returns their ops in order.

    `tf.graph_util.import_graph_def` copies the definition, fills in defaults and runs
    colocation and the device functions for each new op, in Python: several times the
    cost of the import itself.

    Args:
        graph: The graph that receives the nodes.
        definition: Complete nodes in topological order, with their devices.
        inputs: The tensors, by name ("x:0"), that nodes take from outside the
            definition.
        scope: The name scope, with the final "/".
    """
    definition.versions.CopyFrom(graph.graph_def_versions)  # unset means very old
    options = _c_api_util.ScopedTFImportGraphDefOptions()
    _importer._PopulateTFImportGraphDefOptions(
        options.options, scope.removesuffix("/"), inputs, None, False
    )
    with graph._mutation_lock():
        buffer = _c_api.TF_NewBufferFromString(definition.SerializeToString())
        try:
            with graph._c_graph.get() as c_graph:
                results = _c_api.TF_GraphImportGraphDefWithResults(
                    c_graph, buffer, options.options
                )
            _c_api_util.ScopedTFImportGraphDefResults(results)
        finally:
            _c_api.TF_DeleteBuffer(buffer)
        return [
            graph._create_op_from_tf_operation(c_op, compute_device=False)
            for c_op in graph.new_operations()
        ]


class Nodes(plain.Nodes):
    """Ops that are added to the default graph in one import, where that is quicker.

    An import takes a tenth of the time of adding ops by the public API, but goes
    through the whole graph once; so a few ops are added one by one, by `add_op`, in
    half of that time.
    """

    def finish(self, name: str) -> list[tf.Operation]:
        """Adds all ops, in a name scope; returns them by number."""
        graph = tf.compat.v1.get_default_graph()
        with tf.name_scope(name) as scope:
            if len(self._inputs) * _NODES_PER_OP < operation_count(graph):
                return self._add_one_by_one()
            return self._import(graph, scope)

    def _add_one(self, node: Any, inputs: Sequence[tf.Tensor]) -> tf.Operation:
        op = add_op(node.op, inputs, node.attr, node.name, not node.device)
        if node.device:
            op._set_device(node.device)
        return op

    def _import(self, graph: Any, scope: str) -> list[tf.Operation]:
        imported: dict[str, tf.Tensor] = {}
        for node, inputs in zip(self._definition.node, self._inputs, strict=True):
            for x in inputs:
                if isinstance(x, int):
                    node.input.append(f"{plain.node_name(x)}:0")
                    continue
                name = f"given_{id(x)}:{x.value_index}"
                node.input.append(name)
                if name not in imported:
                    imported[name] = graph.capture(x) if graph.building_function else x
        ops = import_nodes(graph, self._definition, imported, scope)
        by_name = {op.name: op for op in ops}
        new_ops = [by_name[scope + node.name] for node in self._definition.node]
        control_inputs = graph._current_control_dependencies()
        in_context = graph._get_control_flow_context() is not None
        for op in new_ops:
            if not op.device:
                graph._apply_device_functions(op)
            if control_inputs or in_context:
                add_control_inputs(op, list(control_inputs))
                op._control_flow_post_processing()
        return new_ops


# Measured: an import goes through this many of the graph's nodes in the time of adding
# one op.
_NODES_PER_OP = 100


def type_attribute(dtype: tf.DType) -> Any:
    return tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)


def add_op(
    type_: str,
    inputs: Sequence[tf.Tensor],
    attributes: Mapping[str, Any],
    name: str | None = None,
    ask_device: bool = True,
) -> tf.Operation:
    """Adds an op whose attributes are all known to the default graph.

    The public calls look them up in the op's definition, which doubles the time.

    Args:
        type_: The op's type.
        inputs: Its inputs, in order.
        attributes: AttrValues of all attributes without a default.
        name: Its name.
        ask_device: Whether the device functions choose its device.
    """
    graph = tf.compat.v1.get_default_graph()
    return graph._create_op_internal(
        type_,
        list(inputs),
        name=name,
        attrs=dict(attributes),
        compute_device=ask_device,
    )
