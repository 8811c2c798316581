# SPDX-License-Identifier: Apache-2.0
"""Encodes tensors as 32-bit words for transport between processes, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from replicator.graph.ir.placeholder import Value

BYTES = 4  # per word


def count(shape: Any, dtype: str) -> Any:
    """Returns the number of words that hold a tensor."""
    size = tf.as_dtype(dtype).size
    if tf.is_tensor(shape):
        return (tf.reduce_prod(shape) * size + BYTES - 1) // BYTES
    return -(-math.prod(shape) * size // BYTES)


def of(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's bits as an int32 vector."""
    if x.dtype == tf.bool:
        x = tf.cast(x, tf.uint8)
    flat = tf.reshape(x, [-1])
    per_word = BYTES // x.dtype.size
    if per_word > 1:
        flat = tf.pad(flat, [[0, -tf.size(flat) % per_word]])
        flat = tf.reshape(flat, [-1, per_word])
    return tf.reshape(tf.bitcast(flat, tf.int32), [-1])


def to_tensor(bits: tf.Tensor, value: Value, shape: Any) -> tf.Tensor:
    """Decodes a tensor from its words."""
    dtype = tf.as_dtype(value.dtype)
    plain = tf.uint8 if dtype == tf.bool else dtype
    per_word = BYTES // plain.size
    if not per_word:
        bits = tf.reshape(bits, [-1, plain.size // BYTES])
    flat = tf.reshape(tf.bitcast(bits, plain), [-1])
    if per_word > 1:
        flat = flat[
            : tf.reduce_prod(shape) if tf.is_tensor(shape) else math.prod(shape)
        ]
    x = tf.reshape(flat, shape)
    if tf.is_tensor(shape):
        x = tf.ensure_shape(x, value.shape)
    return tf.cast(x, tf.bool) if dtype == tf.bool else x
