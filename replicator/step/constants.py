# SPDX-License-Identifier: Apache-2.0
"""Large constants of a step, which are held once for all replicas.

Each replica puts a copy of a NumPy array that step_fn uses into the graph; TensorFlow
copies it again into the definition of each function, branch and loop around it, and
when it runs them. So large constants give way, as soon as they are made, to a tensor
outside of all functions, which is in no definition: one for all constants of its bits.

A plain tf.Graph, which can use no tensor from outside, holds the constants of each
replica. Functions with jit_compile=True hold their own: XLA must know the values of
some, and one trace serves all replicas.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from replicator import _tf, context
from replicator.costs import cost

LARGE = 128 * 1024  # bytes; TensorFlow folds none that are larger than 100 KiB


class Constants:
    """The large constants of one attempt at a build of a step.

    Args:
        build: What the replicas share.
    """

    def __init__(self, build: context.Build) -> None:
        self._build = build
        self._known: list[tf.Tensor] = []
        with tf.init_scope():
            self._movable = tf.executing_eagerly() and cost.share_memory(
                build.world.devices
            )

    def note(self, op: tf.Operation) -> None:
        """Looks at an op that is being made, and moves it outside if it is large."""
        if self._movable and op.type == "Const" and _is_large(op.outputs[0]):
            graph = self._build.graph
            if _tf.is_loop_gradient(op.graph):
                return  # TensorFlow would have to know what it captures
            if _tf.stands_in(graph) and _tf.compiled_function(op.graph, graph) is None:
                _tf.replace_new_constant(op, self._captured)

    def _captured(self, value: np.ndarray) -> tf.Tensor:
        """Returns a value in the graph that is being built."""
        return tf.compat.v1.get_default_graph().capture(self._outside(value))

    def _outside(self, value: np.ndarray) -> tf.Tensor:
        """Returns the tensor of a value; adds it to those that are known."""
        for tensor in self._known:
            if tensor.dtype == value.dtype and tensor.shape == value.shape:
                # As bytes: NaNs are equal then, and zeros of two signs are not.
                if np.array_equal(_bytes(tensor.numpy()), _bytes(value)):
                    return tensor
        with tf.init_scope(), tf.device(self._build.world.devices[0]):
            self._known.append(tf.constant(value))
        return self._known[-1]


def _bytes(value: np.ndarray) -> np.ndarray:
    return np.ravel(value).view(np.uint8)


def _is_large(tensor: tf.Tensor) -> bool:
    count = tensor.shape.num_elements() or 0
    return count * tensor.dtype.size >= LARGE and tensor.dtype.is_numpy_compatible
