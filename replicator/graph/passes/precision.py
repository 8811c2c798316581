# SPDX-License-Identifier: Apache-2.0
"""What all replicas received is treated alike where TensorFlow lowers the precision.

TensorFlow's auto_mixed_precision rewrites a graph when it first runs: products are
computed in 16 bits, and so is arithmetic of which an operand came from one, on the same
device. Where a reduced gradient was made, the update would be computed in 16 bits, and
elsewhere, behind a copy, in 32: the replicas would drift apart. An op of a type that
this rewriting does not know, in front of each result, makes all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def may_be_lowered() -> bool:
    """Whether TensorFlow may lower the precision of the step that is being built.

    A session is given its own configuration when it is made, which nobody knows here.
    """
    with tf.init_scope():
        if not tf.executing_eagerly():
            return True
    options = tf.config.optimizer.get_experimental_options()
    return any(on for name, on in options.items() if "mixed_precision" in name)


def keep(results: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
    """Returns results of a communication that what uses them cannot tell apart.

    Args:
        results: `results[n][k]` is what the n-th participant receives as its k-th.
    """
    kept: dict[int, tf.Tensor] = {}
    for tensor in (tensor for own in results for tensor in own):
        if id(tensor) not in kept:
            kept[id(tensor)] = _kept(tensor)
    return [[kept[id(tensor)] for tensor in own] for own in results]


def _kept(tensor: tf.Tensor) -> tf.Tensor:
    known = tensor.op.type == "PlaceholderWithDefault"  # as sums are shielded
    if known or tensor.dtype not in (tf.float32, tf.float64):
        return tensor
    with tf.device(None), tf.device(tensor.device):
        # It has a kernel on all devices, which copies nothing.
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
