# SPDX-License-Identifier: Apache-2.0
"""Sums of 16-bit floats that return all of their rounding errors.

Each replica sums one slice in float32 and sends the rounded result to all: twice as
many messages as an all_reduce, and as many bytes. The rounding error of a sum is known
only where the slice is summed.

Source: the reduce-scatter and all-gather of Thakur, Rabenseifner and Gropp 2005,
Optimization of collective communication operations in MPICH; compressing the result
too, with an error of its own, is from Tang et al. 2019, DoubleSqueeze.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from replicator import context
from replicator.compressors.link import Link
from replicator.costs import cost
from replicator.graph.ir import shapes


def narrow(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Casts to a smaller dtype; finite values stay finite."""
    most = tf.constant(dtype.max, tensor.dtype)
    within = tf.clip_by_value(tensor, -most, most)
    return tf.cast(tf.where(tf.math.is_finite(tensor), within, tensor), dtype)


def add_up(
    tensors: Sequence[tf.Tensor], link: Link
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Sums tensors over the replicas.

    Args:
        tensors: Tensors of 16-bit floats.
        link: Communicates.

    Returns:
        The totals that all replicas receive, in the dtype of the tensors; and, in
        float32, the rounding errors of this replica's slice, with zeros elsewhere. Over
        all replicas they add up to the whole error.
    """
    buckets = _bucketed(tensors, link)
    packs = [_Pack([tensors[k] for k in bucket]) for bucket in buckets]
    rows = [pack.rows(link.size) for pack in packs]
    slice_ids = tf.range(link.size)[:, tf.newaxis]  # tells each replica its slice
    *received, slice_id = link.exchange([*rows, slice_ids])
    sums = [tf.reduce_sum(tf.cast(parts, tf.float32), 0) for parts in received]
    small = [narrow(total, tensors[0].dtype) for total in sums]
    is_mine = tf.equal(tf.range(link.size), slice_id[0])[:, tf.newaxis]
    totals, rounding_errors = list(tensors), list(tensors)
    for bucket, pack, exact, rounded in zip(
        buckets, packs, sums, link.collect(small), strict=True
    ):
        error = exact - tf.cast(rounded, tf.float32)
        pieces = pack.split(rounded), pack.split(tf.where(is_mine, error, 0.0))
        for k, total, error_part in zip(bucket, *pieces, strict=True):
            totals[k], rounding_errors[k] = total, error_part
    return totals, rounding_errors


def _bucketed(tensors: Sequence[tf.Tensor], link: Link) -> list[list[int]]:
    """Groups the tensors into packs: small ones that share a bucket."""
    flat = [[tf.reshape(tensor, [-1])] for tensor in tensors]
    fusion = context.require("a compressor").build.options.fusion
    buckets = [policy.bucket for policy in link.policies]
    return cost.buckets(flat, cost.Policy(fusion=fusion), buckets)


class _Pack:
    """Concatenated tensors as a matrix of one row per replica."""

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        self._tensors = tensors

    def rows(self, count: int) -> tf.Tensor:
        """Returns all numbers in `count` rows, the last one padded with zeros."""
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in self._tensors], 0)
        (size,) = shapes.sizes(flat)
        if size is None:
            padded = tf.pad(flat, [[0, -tf.size(flat) % count]])
        else:
            padded = tf.pad(flat, [[0, -size % count]])
        return tf.reshape(padded, [count, -1])

    def split(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Splits the rows into tensors of the original shapes."""
        flat = tf.reshape(rows, [-1])
        sizes = [
            math.prod(tensor.shape.as_list())
            if tensor.shape.is_fully_defined()
            else tf.size(tensor)
            for tensor in self._tensors
        ]
        parts, begin = [], 0
        for tensor, size in zip(self._tensors, sizes, strict=True):
            part = tf.reshape(flat[begin : begin + size], tf.shape(tensor))
            parts.append(tf.ensure_shape(part, tensor.shape))
            begin += size
        return parts
