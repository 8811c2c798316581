# SPDX-License-Identifier: Apache-2.0
"""Gathers the shards of all replicas, where a shard alone is not enough.

Anything computed from the whole batch on every replica is equal on all of them. The
gradient arrives as the replica's share, so that the mean over the replicas, weighted by
their examples, is the gradient on one device.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.inputs.shards import Shard
from replicator.primitives import all_gather, weighing

_MASK = "_keras_mask"  # the attribute that Keras' guide to masking shows


def whole(value: Any, shard: Shard) -> Any:
    """Concatenates the tensors of all replicas, in replica order.

    Args:
        value: A nest of dense and ragged tensors, whose first axis is the batch's.
            Scalars, None and other objects are left alone. A tensor's Keras mask is
            gathered with it.
        shard: The replica's shard.

    Raises:
        ArgumentError: The nest contains a sparse tensor.
    """
    return tf.nest.map_structure(lambda leaf: _whole_leaf(leaf, shard), value)


def mask_of(tensor: Any) -> Any:
    """Returns the mask that Keras' layers attached to a tensor, or None."""
    return getattr(tensor, _MASK, None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor as Keras' layers do, unless it is None."""
    if mask is not None:
        setattr(tensor, _MASK, mask)


def _whole_leaf(leaf: Any, shard: Shard) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        raise errors.ArgumentError(
            errors.compose(
                "a loss or metric that needs the whole batch was given a SparseTensor, "
                "which replicas cannot gather.",
                [f"at {errors.user_line()}"],
                "make it dense with tf.sparse.to_dense(...).",
            )
        )
    if isinstance(leaf, tf.RaggedTensor):
        lengths = [
            all_gather.all_gather(part, axis=0) for part in leaf.nested_row_lengths()
        ]
        values = _gathered(leaf.flat_values, shard)
        return tf.RaggedTensor.from_nested_row_lengths(values, lengths, validate=False)
    if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
        return leaf
    gathered = _gathered(tf.convert_to_tensor(leaf), shard)
    mask = mask_of(leaf)
    if mask is not None:
        set_mask(gathered, all_gather.all_gather(mask, axis=0))
    return gathered


def _gathered(tensor: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Gathers a tensor so that its gradient is the replica's share."""
    if tensor.dtype.is_floating or tensor.dtype.is_complex:
        tensor = _with_share(tensor, shard)
    return all_gather.all_gather(tensor, axis=0)


def _with_share(tensor: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Returns a tensor whose gradient is scaled for the mean that follows.

    Each replica gets the sum of the gradients of num_replicas equal losses. Unless the
    losses were weighted before, the weighted mean of the gradients multiplies that by
    its share of the examples.
    """
    replica = context.require("a loss")
    replicas = replica.num_replicas

    @tf.custom_gradient
    def identity(x: tf.Tensor) -> Any:
        def gradient(d: tf.Tensor) -> tf.Tensor:
            if replica.shard is None or replica.weighed or weighing.is_known(replica):
                return d
            parts = tf.cast(shard.count, tf.float64) * replicas
            share = tf.math.divide_no_nan(tf.cast(shard.total, tf.float64), parts)
            return d * tf.cast(share, d.dtype)

        return tf.identity(x), gradient

    return identity(tensor)
