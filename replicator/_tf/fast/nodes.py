# SPDX-License-Identifier: Apache-2.0
"""Adds ops of which all is known: many of them at once, or one with less Python."""

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

    `tf.graph_util.import_graph_def` copies the definition, fills in defaults and asks
    each new op for its colocation and the device functions, in Python: several times
    what the import itself takes.

    Args:
        graph: Where the nodes go.
        definition: Complete nodes, each behind its inputs, with their devices.
        inputs: By name, "x:0", what nodes are given that are not in the definition.
        scope: The name scope, with the final "/".
    """
    definition.versions.CopyFrom(graph.graph_def_versions)  # or it counts as very old
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
    """Ops that are added to the default graph at once, where that is quicker.

    An import takes a tenth of the time that adding ops by the public API takes, but
    goes through the whole graph once; so a few ops are added one by one, in half of
    the time, see `add_op`.
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
        given: dict[str, tf.Tensor] = {}
        for node, inputs in zip(self._definition.node, self._inputs, strict=True):
            for x in inputs:
                if isinstance(x, int):
                    node.input.append(f"{plain.node_name(x)}:0")
                    continue
                name = f"given_{id(x)}:{x.value_index}"
                node.input.append(name)
                if name not in given:
                    given[name] = graph.capture(x) if graph.building_function else x
        ops = import_nodes(graph, self._definition, given, scope)
        by_name = {op.name: op for op in ops}
        made = [by_name[scope + node.name] for node in self._definition.node]
        before = graph._current_control_dependencies()
        inside = graph._get_control_flow_context() is not None
        for op in made:
            if not op.device:
                graph._apply_device_functions(op)
            if before or inside:
                add_control_inputs(op, list(before))
                op._control_flow_post_processing()
        return made


# An import looks at so many nodes of the graph in the time of adding an op: measured.
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
    """Adds an op to the default graph, of which all attributes are known.

    The public calls find them out by the op's definition, which takes as long again.

    Args:
        type_: Its type.
        inputs: Its inputs, in order.
        attributes: AttrValues of all attributes without a default.
        name: What it is called.
        ask_device: Whether the device functions say where it is.
    """
    graph = tf.compat.v1.get_default_graph()
    return graph._create_op_internal(
        type_,
        list(inputs),
        name=name,
        attrs=dict(attributes),
        compute_device=ask_device,
    )
