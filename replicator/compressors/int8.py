# SPDX-License-Identifier: Apache-2.0
"""int8: tensors are sent as integer multiples of a step size, one per tensor.

The step size is the same on all replicas, so that multiples can be summed as they are,
and is chosen so that their sum fits into 8 bits as well. Rounding is stochastic and
unbiased.

Source: Alistarh et al. 2017, QSGD (arXiv:1610.02132), for stochastic rounding; a step
size that replicas share is from Wen et al. 2017, TernGrad.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from replicator import errors
from replicator.compressors.base import Compressor, Sums
from replicator.compressors.link import Link

_LARGEST = 127
_MOST_REPLICAS = 64


@dataclasses.dataclass(frozen=True)
class Int8(Compressor):
    """Sends tensors as 8-bit integers: a quarter of the bytes of float32.

    The step size is the sum of the replicas' largest absolute values, divided by 127
    minus the number of replicas. A mean is as precise on many replicas as on few; at
    most 64 replicas are supported.

    Example:
        >>> from replicator import compressors
        >>> def step_fn():
        ...     return repl.all_reduce(tf.constant([4.0, 1.0]), compressor="int8")
        >>> x = repl.run(step_fn)[0].numpy()  # multiples of 8 / 125, the nearest two
        >>> bool(abs(x - [8, 2]).max() < 0.128)
        True
    """

    def reduce(self, tensors: Sequence[tf.Tensor], link: Link) -> Sums:
        """Sums tensors; see the module's docstring."""
        if link.size > _MOST_REPLICAS:
            raise errors.ArgumentError(
                f"int8 cannot add up what {link.size} replicas send: sums of more than "
                f"{_MOST_REPLICAS} numbers leave no precision in 8 bits.",
                fix='compress with "bf16", or reduce in groups first.',
            )
        peaks = tf.stack([_peak(tensor) for tensor in tensors])
        (total,) = link.sum([peaks], of=[None])
        steps = tf.unstack(total / (_LARGEST - link.size), len(tensors))
        quantized, sizes = [], []
        for tensor, step in zip(tensors, steps, strict=True):
            size = tf.cast(step, tensor.dtype)
            noise = link.uniform(tf.shape(tensor), tensor.dtype)
            multiples = tf.floor(tf.math.divide_no_nan(tensor, size) + noise)
            quantized.append(tf.cast(multiples, tf.int8))
            sizes.append(size)
        totals = [
            tf.cast(multiples, size.dtype) * size
            for multiples, size in zip(link.sum(quantized), sizes, strict=True)
        ]
        sent = [
            tf.cast(multiples, size.dtype) * size
            for multiples, size in zip(quantized, sizes, strict=True)
        ]
        return Sums(totals, sent)


def _peak(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the largest absolute value; infinity if any value is not finite.

    All sums are then inf or NaN, as they would be uncompressed.
    """
    infinity = tf.constant(float("inf"), tensor.dtype)
    sizes = tf.where(tf.math.is_finite(tensor), tf.abs(tensor), infinity)
    return tf.cast(tf.maximum(tf.reduce_max(sizes), 0), tf.float32)
