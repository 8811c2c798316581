# SPDX-License-Identifier: Apache-2.0
"""Sums of 16-bit floats of which nothing gets lost.

Each replica adds up one slice of all numbers, in float32, and sends what it makes of
that to all: twice as many messages as an all_reduce, and as many bytes. What rounding
takes of a sum is known where the slice is added up, and only there.

Source: the reduce-scatter and all-gather of Thakur, Rabenseifner and Gropp 2005,
Optimization of collective communication operations in MPICH; that what is sent back
can be compressed, too, with an error of its own, is from Tang et al. 2019,
DoubleSqueeze.
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
    """Casts to a smaller dtype; what is finite stays so."""
    most = tf.constant(dtype.max, tensor.dtype)
    within = tf.clip_by_value(tensor, -most, most)
    return tf.cast(tf.where(tf.math.is_finite(tensor), within, tensor), dtype)


def add_up(
    tensors: Sequence[tf.Tensor], link: Link
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Adds up tensors over the replicas.

    Args:
        tensors: Of 16-bit floats.
        link: By which they travel.

    Returns:
        What all replicas receive, in the dtype of the tensors; and, in float32, what
        this replica's slices lack: those of all replicas add up to all that is lacking.
    """
    together = _together(tensors, link)
    packs = [_Pack([tensors[k] for k in own]) for own in together]
    rows = [pack.rows(link.size) for pack in packs]
    turns = tf.range(link.size)[:, tf.newaxis]  # by which a replica knows its slice
    *received, turn = link.exchange([*rows, turns])
    sums = [tf.reduce_sum(tf.cast(parts, tf.float32), 0) for parts in received]
    small = [narrow(total, tensors[0].dtype) for total in sums]
    is_mine = tf.equal(tf.range(link.size), turn[0])[:, tf.newaxis]
    totals, rests = list(tensors), list(tensors)
    for own, pack, exact, whole in zip(
        together, packs, sums, link.collect(small), strict=True
    ):
        lacking = exact - tf.cast(whole, tf.float32)
        made = pack.apart(whole), pack.apart(tf.where(is_mine, lacking, 0.0))
        for k, total, rest in zip(own, *made, strict=True):
            totals[k], rests[k] = total, rest
    return totals, rests


def _together(tensors: Sequence[tf.Tensor], link: Link) -> list[list[int]]:
    """Returns which tensors travel together: small ones of one bucket."""
    flat = [[tf.reshape(tensor, [-1])] for tensor in tensors]
    fusion = context.require("a compressor").build.options.fusion
    buckets = [policy.bucket for policy in link.policies]
    return cost.buckets(flat, cost.Policy(fusion=fusion), buckets)


class _Pack:
    """Tensors one behind the other, in rows of one length, one for each replica."""

    def __init__(self, tensors: Sequence[tf.Tensor]) -> None:
        self._tensors = tensors

    def rows(self, count: int) -> tf.Tensor:
        """Returns all numbers in so many rows, the last filled up with zeros."""
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in self._tensors], 0)
        (size,) = shapes.sizes(flat)
        if size is None:
            filled = tf.pad(flat, [[0, -tf.size(flat) % count]])
        else:
            filled = tf.pad(flat, [[0, -size % count]])
        return tf.reshape(filled, [count, -1])

    def apart(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns what is in the places of the tensors, of their shapes."""
        flat = tf.reshape(rows, [-1])
        sizes = [
            math.prod(tensor.shape.as_list())
            if tensor.shape.is_fully_defined()
            else tf.size(tensor)
            for tensor in self._tensors
        ]
        made, begin = [], 0
        for tensor, size in zip(self._tensors, sizes, strict=True):
            part = tf.reshape(flat[begin : begin + size], tf.shape(tensor))
            made.append(tf.ensure_shape(part, tensor.shape))
            begin += size
        return made
