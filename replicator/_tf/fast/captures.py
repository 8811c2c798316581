# SPDX-License-Identifier: Apache-2.0
"""Captures many resources in a function graph at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.function.capture import capture_container as _container
from tensorflow.python.ops import handle_data_util

from replicator._tf.fast.nodes import Nodes

_NEEDED = (
    _container.FunctionCaptures.add_or_replace,
    _container.FunctionCaptures.by_val_internal,
    handle_data_util.copy_handle_data,
    tf.__internal__.FuncGraph.function_captures,
)


def capture_all(graph: Any, handles: Sequence[tuple[tf.Tensor, str]]) -> None:
    """Captures eager resources in a function graph, before anything uses them.

    The graph would capture each on its first use, which takes several times as long.
    Its captures can be read publicly, but not added to.

    Args:
        graph: The graph.
        handles: The resources, each with the device of its placeholder: code that
            colocates ops with a variable builds them there.
    """
    captures = graph.function_captures
    pairs = [pair for pair in handles if id(pair[0]) not in captures.by_val_internal]
    new, nodes = [handle for handle, _ in pairs], Nodes()
    for handle, device in pairs:
        shape = handle.shape
        nodes.add("Placeholder", device=device, dtype=handle.dtype, shape=shape)
    with graph.as_default(), tf.control_dependencies(None):
        ops = nodes.finish("captured") if new else []
    for handle, op in zip(new, ops, strict=True):
        (placeholder,) = op.outputs
        handle_data_util.copy_handle_data(handle, placeholder)
        captures.add_or_replace(
            key=id(handle), external=handle, internal=placeholder, is_by_ref=False
        )
        graph.inputs.append(placeholder)
