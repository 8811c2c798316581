# SPDX-License-Identifier: Apache-2.0
"""What a compressor is: the base class, for those here and for users' own.

A compressor is asked to add up tensors over the replicas, for a sum: what is to be a
mean is scaled beforehand, each replica's share of it, with weights or without. It
builds its communication from the primitives that its Link offers, in the step of one
replica at a time, as a user would in step_fn; so it works wherever these do.

Floating numbers are compressed; anything else is reduced as without a compressor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from replicator import errors
from replicator.compressors.link import Link


@dataclasses.dataclass(frozen=True)
class Sums:
    """What comes of a compressed sum.

    Attributes:
        totals: What the replicas receive in place of the sums; the same on all.
        sent: This replica's part of it: those of all replicas add up to `totals`. What
            it differs by from what was to be sent is what error feedback keeps.
    """

    totals: Sequence[tf.Tensor]
    sent: Sequence[tf.Tensor]


class Compressor:
    """Makes what replicas add up smaller on its way: the base class.

    One of your own is a class with `compress` and `decompress`. What they make of a
    tensor goes to all replicas, which add up what comes out. A compressor whose sums
    can be made of less has `reduce` in place of both. It keeps nothing in itself: what
    there is from step to step is in variables, which a Link makes.

    Example:
        >>> from replicator import compressors
        >>> class Sign(compressors.Compressor):  # 1-bit SGD (Seide et al. 2014)
        ...     def compress(self, tensor):
        ...         return tensor > 0, tf.reduce_mean(tf.abs(tensor))
        ...     def decompress(self, payload, shape):
        ...         positive, size = payload
        ...         return tf.where(positive, size, -size)
        >>> def step_fn():
        ...     return repl.all_reduce(tf.constant([1.0, -3.0]), compressor=Sign())
        >>> repl.run(step_fn)[0].numpy()
        array([ 4., -4.], dtype=float32)

    Attributes:
        rows: The dtype in which the rows of sparse gradients travel; None: theirs.
        owes: Whether it keeps what it has not sent.
    """

    rows: ClassVar[tf.DType | None] = None
    owes: ClassVar[bool] = False

    def compress(self, tensor: tf.Tensor) -> Any:
        """Returns what is sent of a tensor.

        Args:
            tensor: Floating numbers, of this replica.

        Returns:
            A nest of tensors, of the same dtypes and shapes on all replicas.
        """
        raise NotImplementedError

    def decompress(self, payload: Any, shape: tf.Tensor) -> tf.Tensor:
        """Returns what is made of what a replica sent.

        By ops whose results depend on nothing but the payload: all replicas make the
        same of it.

        Args:
            payload: What `compress` returned there.
            shape: That of the tensor, a vector of integers.
        """
        raise NotImplementedError

    def reduce(self, tensors: Sequence[tf.Tensor], link: Link) -> Sums:
        """Adds up tensors over the replicas.

        Args:
            tensors: At least one, dense, of floating numbers of at least 32 bits.
            link: By which it communicates and remembers.
        """
        payloads = [self.compress(tensor) for tensor in tensors]
        gathered = link.gather(payloads)
        totals, sent = [], []
        for tensor, own, everyone in zip(tensors, payloads, gathered, strict=True):
            parts = [
                self._restored(
                    tf.nest.map_structure(lambda t, n=n: t[n], everyone), tensor
                )
                for n in range(link.size)
            ]
            # Not a chain of additions, which TensorFlow would order as it likes.
            totals.append(tf.reduce_sum(tf.stack(parts), 0))
            sent.append(self._restored(own, tensor))
        return Sums(totals, sent)

    def _restored(self, payload: Any, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what comes out of a payload, of the tensor's dtype and shape."""
        made = tf.cast(self.decompress(payload, shape_of(tensor)), tensor.dtype)
        if not made.shape.is_compatible_with(tensor.shape):
            raise errors.ArgumentError(
                errors.compose(
                    f"decompress of {type(self).__name__} returned a tensor of shape "
                    f"{made.shape} for one of shape {tensor.shape}.",
                    fix="return what has the shape that it is given.",
                )
            )
        return made


def shape_of(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's shape, a constant if it is known."""
    if tensor.shape.is_fully_defined():
        return tf.constant(tensor.shape.as_list(), tf.int32)
    return tf.shape(tensor)
