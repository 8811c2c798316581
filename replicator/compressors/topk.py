# SPDX-License-Identifier: Apache-2.0
"""topk: each tensor's numbers of largest absolute value are sent, with their indices.

Sources: Aji and Heafield 2017, Sparse communication for distributed gradient descent;
Stich et al. 2018, Sparsified SGD with memory (arXiv:1809.07599), with error feedback,
without which this is of little use.
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
    """Sends each tensor's numbers of largest absolute value, with their indices.

    Each takes 8 bytes instead of 4 and goes from every replica to all: fewer bytes in
    total if the ratio is well below a half divided by the number of replicas.

    Example:
        >>> from replicator import compressors
        >>> def step_fn():
        ...     x = tf.constant([1.0, -3.0, 2.0, 0.5])
        ...     return repl.all_reduce(x, compressor="topk(ratio=0.5)")
        >>> repl.run(step_fn)[0].numpy()
        array([ 0., -6.,  4.,  0.], dtype=float32)

    Attributes:
        ratio: The fraction of the numbers to send, at least one; 0 < ratio <= 1.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        checks.number("topk", "ratio", self.ratio, 0.0, 1.0)
        object.__setattr__(self, "ratio", float(self.ratio))

    def reduce(self, tensors: Sequence[tf.Tensor], link: Link) -> Sums:
        """Sums tensors; see the module's docstring."""
        payloads = [self._choose(tensor) for tensor in tensors]
        totals, sent = [], []
        gathered = link.gather(payloads)
        for tensor, payload, stacked in zip(tensors, payloads, gathered, strict=True):
            total = tf.zeros([_size(tensor)], tensor.dtype)
            contribution = _scatter_add(total, *payload)
            # One replica after another: within one, no index occurs twice, so the
            # order of the additions is the same on all devices.
            for values, indices in zip(*map(tf.unstack, stacked), strict=True):
                total = _scatter_add(total, values, indices)
            totals.append(tf.reshape(total, shape_of(tensor)))
            sent.append(tf.reshape(contribution, shape_of(tensor)))
        return Sums(totals, sent)

    def _choose(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the largest numbers and their indices in the flat tensor."""
        flat = tf.reshape(tensor, [-1])
        size = _size(tensor)
        if isinstance(size, int):
            count = min(size, max(1, math.ceil(self.ratio * size)))
        else:
            share = tf.math.ceil(self.ratio * tf.cast(size, tf.float64))
            count = tf.minimum(size, tf.maximum(1, tf.cast(share, tf.int32)))
        # Inf and NaN rank first, so that a check of the result finds them.
        infinity = tf.constant(float("inf"), tensor.dtype)
        sizes = tf.where(tf.math.is_finite(flat), tf.abs(flat), infinity)
        _, indices = tf.math.top_k(sizes, count, sorted=False)
        return tf.gather(flat, indices), indices


def _size(tensor: tf.Tensor) -> int | tf.Tensor:
    static_size = tensor.shape.num_elements()
    return tf.size(tensor) if static_size is None else static_size


def _scatter_add(total: tf.Tensor, values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_add(total, indices[:, tf.newaxis], values)
