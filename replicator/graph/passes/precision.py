# SPDX-License-Identifier: Apache-2.0
"""Keeps replicas equal where TensorFlow lowers the precision of what they receive.

TensorFlow's auto_mixed_precision rewrites a graph when it first runs: products are
computed in 16 bits, and so is arithmetic with an operand that comes from one on the
same device. On the device that computed a reduced gradient, the update would be
computed in 16 bits, and on the others, which use a copy of it, in 32: the replicas
would drift apart. An op of a type that the rewriter does not know, added to each
result, makes them all alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def may_be_lowered() -> bool:
    """Whether TensorFlow may lower the precision of the step that is being built.

    A session gets its own configuration when it is created, which is not known here.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return True
    options = tf.config.optimizer.get_experimental_options()
    return any(on for name, on in options.items() if "mixed_precision" in name)


def keep(results: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
    """Shields the results of a communication, so that all are used in one precision.

    Args:
        results: `results[n][k]` is the k-th result of the n-th participant.
    """
    shielded: dict[int, tf.Tensor] = {}
    for tensor in (tensor for row in results for tensor in row):
        if id(tensor) not in shielded:
            shielded[id(tensor)] = _shielded(tensor)
    return [[shielded[id(tensor)] for tensor in row] for row in results]


def _shielded(tensor: tf.Tensor) -> tf.Tensor:
    is_shielded = tensor.op.type == "PlaceholderWithDefault"  # as sums are shielded
    if is_shielded or tensor.dtype not in (tf.float32, tf.float64):
        return tensor
    with tf.device(None), tf.device(tensor.device):
        # This op has a kernel on all devices, which copies nothing.
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
