# SPDX-License-Identifier: Apache-2.0
"""Resolves the captured inputs of traced functions, in graphs nested in graphs."""

from __future__ import annotations

import tensorflow as tf


class Captures:
    """Looks up what captured tensors are outside, and caches the answers."""

    def __init__(self) -> None:
        self._external: dict[tf.Graph, dict[int, tf.Tensor]] = {}

    def outermost(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor outside all functions that is captured as `tensor`."""
        while tf.is_symbolic_tensor(tensor) and tensor.graph.building_function:
            outer = self._outside(tensor)
            if outer is None:
                break
            tensor = outer
        return tensor

    def _outside(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the tensor that is captured as `tensor`, or None."""
        graph = tensor.graph
        captured = self._external.get(graph, {})
        if id(tensor) not in captured and tensor.op.type == "Placeholder":
            # Refresh: a function that is still being traced adds captures.
            captured = {id(inner): outer for outer, inner in graph.captures}
            self._external[graph] = captured
        return captured.get(id(tensor))
