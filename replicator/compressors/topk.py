# SPDX-License-Identifier: Apache-2.0
"""topk: of each tensor, the numbers that are largest, and where they are.

Sources: Aji and Heafield 2017, Sparse communication for distributed gradient descent;
Stich et al. 2018, Sparsified SGD with memory (arXiv:1809.07599): with error feedback,
which this needs to be of use.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from replicator.compressors import checks
from replicator.compressors.base import Compressor, Sums, shape_of
from replicator.compressors.link import Link


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """Of each tensor, the numbers of largest absolute value travel, with their places.

    Each takes 8 bytes in place of 4, from each replica to all: less in all where the
    ratio is well below a half, by the number of replicas.

    Example:
        >>> from replicator import compressors
        >>> def step_fn():
        ...     x = tf.constant([1.0, -3.0, 2.0, 0.5])
        ...     return repl.all_reduce(x, compressor="topk(ratio=0.5)")
        >>> repl.run(step_fn)[0].numpy()
        array([ 0., -6.,  4.,  0.], dtype=float32)

    Attributes:
        ratio: Which share of the numbers, at least one; 0 < ratio <= 1.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        checks.number("topk", "ratio", self.ratio, 0.0, 1.0)
        object.__setattr__(self, "ratio", float(self.ratio))

    def reduce(self, tensors: Sequence[tf.Tensor], link: Link) -> Sums:
        """Adds up tensors; see the module's docstring."""
        chosen = [self._choose(tensor) for tensor in tensors]
        totals, sent = [], []
        gathered = link.gather(chosen)
        for tensor, own, everyone in zip(tensors, chosen, gathered, strict=True):
            total = tf.zeros([_size(tensor)], tensor.dtype)
            mine = _added(total, *own)
            # One replica after the other: within one, no place is there twice, and the
            # order of the additions is one on all devices.
            for values, places in zip(*map(tf.unstack, everyone), strict=True):
                total = _added(total, values, places)
            totals.append(tf.reshape(total, shape_of(tensor)))
            sent.append(tf.reshape(mine, shape_of(tensor)))
        return Sums(totals, sent)

    def _choose(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the largest numbers and where they are in the flat tensor."""
        flat = tf.reshape(tensor, [-1])
        size = _size(tensor)
        if isinstance(size, int):
            count = min(size, max(1, math.ceil(self.ratio * size)))
        else:
            share = tf.math.ceil(self.ratio * tf.cast(size, tf.float64))
            count = tf.minimum(size, tf.maximum(1, tf.cast(share, tf.int32)))
        # What is no number comes first, so that whoever looks for it finds it.
        infinity = tf.constant(float("inf"), tensor.dtype)
        sizes = tf.where(tf.math.is_finite(flat), tf.abs(flat), infinity)
        _, places = tf.math.top_k(sizes, count, sorted=False)
        return tf.gather(flat, places), places


def _size(tensor: tf.Tensor) -> int | tf.Tensor:
    known = tensor.shape.num_elements()
    return tf.size(tensor) if known is None else known


def _added(total: tf.Tensor, values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_add(total, places[:, tf.newaxis], values)
