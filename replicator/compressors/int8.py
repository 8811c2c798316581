# SPDX-License-Identifier: Apache-2.0
"""int8: numbers travel as whole multiples of a step, one for each tensor.

The step is the same on all replicas, so that multiples can be added up as they are: it
is chosen so that their sum fits into 8 bits, too. Rounding is stochastic, up as often
as it takes for the mean to be right.

Source: Alistarh et al. 2017, QSGD (arXiv:1610.02132), for stochastic rounding; a step
that replicas share is from Wen et al. 2017, TernGrad.
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
    """Numbers travel as 8-bit integers: a quarter of the bytes of float32.

    The step is the sum of the replicas' largest numbers, by 127 less one for each
    replica. A mean is as precise on many replicas as on few; there are 64 at most.

    Example:
        >>> from replicator import compressors
        >>> def step_fn():
        ...     return repl.all_reduce(tf.constant([4.0, 1.0]), compressor="int8")
        >>> x = repl.run(step_fn)[0].numpy()  # multiples of 8 / 125, the nearest two
        >>> bool(abs(x - [8, 2]).max() < 0.128)
        True
    """

    def reduce(self, tensors: Sequence[tf.Tensor], link: Link) -> Sums:
        """Adds up tensors; see the module's docstring."""
        if link.size > _MOST_REPLICAS:
            raise errors.ArgumentError(
                errors.compose(
                    f"int8 cannot add up what {link.size} replicas send: sums of more "
                    f"than {_MOST_REPLICAS} numbers leave no precision in 8 bits.",
                    [f"at {errors.user_line()}"],
                    'compress by "bf16", or reduce in groups first.',
                )
            )
        peaks = tf.stack([_peak(tensor) for tensor in tensors])
        (total,) = link.sum([peaks], of=[None])
        steps = tf.unstack(total / (_LARGEST - link.size), len(tensors))
        wholes, sizes = [], []
        for tensor, step in zip(tensors, steps, strict=True):
            size = tf.cast(step, tensor.dtype)
            noise = link.uniform(tf.shape(tensor), tensor.dtype)
            multiples = tf.floor(tf.math.divide_no_nan(tensor, size) + noise)
            wholes.append(tf.cast(multiples, tf.int8))
            sizes.append(size)
        totals = [
            tf.cast(whole, size.dtype) * size
            for whole, size in zip(link.sum(wholes), sizes, strict=True)
        ]
        sent = [
            tf.cast(whole, size.dtype) * size
            for whole, size in zip(wholes, sizes, strict=True)
        ]
        return Sums(totals, sent)


def _peak(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the largest absolute value; infinity, if not all are finite.

    All sums are infinite then, or no numbers, as they would be uncompressed.
    """
    infinity = tf.constant(float("inf"), tensor.dtype)
    sizes = tf.where(tf.math.is_finite(tensor), tf.abs(tensor), infinity)
    return tf.cast(tf.maximum(tf.reduce_max(sizes), 0), tf.float32)
