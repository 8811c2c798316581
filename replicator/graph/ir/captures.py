# SPDX-License-Identifier: Apache-2.0
"""What the inputs of traced functions stand for, in graphs inside graphs."""

from __future__ import annotations

import tensorflow as tf


class Captures:
    """Looks up what captured tensors are outside; remembers what it has seen."""

    def __init__(self) -> None:
        self._external: dict[tf.Graph, dict[int, tf.Tensor]] = {}

    def outermost(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor that a captured tensor is, outside of all functions."""
        while tf.is_symbolic_tensor(tensor) and tensor.graph.building_function:
            outer = self._outside(tensor)
            if outer is None:
                break
            tensor = outer
        return tensor

    def _outside(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the tensor that is captured as `tensor`, or None."""
        graph = tensor.graph
        known = self._external.get(graph, {})
        if id(tensor) not in known and tensor.op.type == "Placeholder":
            # Not seen yet: a function that is being traced goes on capturing.
            known = {id(inner): outer for outer, inner in graph.captures}
            self._external[graph] = known
        return known.get(id(tensor))
