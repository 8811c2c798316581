# SPDX-License-Identifier: Apache-2.0
"""Large constants of a step, held once for all replicas.

Each replica puts a copy of every NumPy array that step_fn uses into the graph;
TensorFlow copies it again into the definition of each enclosing function, branch and
loop, and when it runs them. So large constants are replaced, as soon as they are
created, by a tensor outside all functions, which is in no definition: one for all
constants with the same bits.

A plain tf.Graph, which can use no tensor from outside, holds each replica's constants.
Functions with jit_compile=True hold their own: XLA must know the values of some, and
one trace serves all replicas.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from replicator import context
from replicator._tf import choice, control_flow, graphs
from replicator.costs import cost

LARGE = 128 * 1024  # bytes; TensorFlow does not fold constants above 100 KiB


class Constants:
    """The large constants of one attempt at building a step.

    Args:
        build: The state shared by the replicas.
    """

    def __init__(self, build: context.Build) -> None:
        self._build = build
        self._eager: list[tf.Tensor] = []
        with tf.init_scope():
            self._movable = tf.executing_eagerly() and cost.share_memory(
                build.world.devices
            )

    def note(self, op: tf.Operation) -> None:
        """Moves a newly created op outside all functions if it is a large constant."""
        if self._movable and op.type == "Const" and _is_large(op.outputs[0]):
            graph = self._build.graph
            if control_flow.is_loop_gradient(op.graph):
                return  # TensorFlow has to know all captures of these
            if (
                graphs.stands_in(graph)
                and control_flow.compiled_function(op.graph, graph) is None
            ):
                choice.replace_new_constant(op, self._captured)

    def _captured(self, value: np.ndarray) -> tf.Tensor:
        """Captures the shared tensor of a value in the default graph."""
        return tf.compat.v1.get_default_graph().capture(self._outside(value))

    def _outside(self, value: np.ndarray) -> tf.Tensor:
        """Returns the shared tensor of a value, creating it if there is none."""
        for tensor in self._eager:
            if tensor.dtype == value.dtype and tensor.shape == value.shape:
                # As bytes: NaNs are then equal, and zeros of opposite signs are not.
                if np.array_equal(_bytes(tensor.numpy()), _bytes(value)):
                    return tensor
        with tf.init_scope(), tf.device(self._build.world.devices[0]):
            self._eager.append(tf.constant(value))
        return self._eager[-1]


def _bytes(value: np.ndarray) -> np.ndarray:
    return np.ravel(value).view(np.uint8)


def _is_large(tensor: tf.Tensor) -> bool:
    count = tensor.shape.num_elements() or 0
    return count * tensor.dtype.size >= LARGE and tensor.dtype.is_numpy_compatible
