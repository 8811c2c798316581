# SPDX-License-Identifier: Apache-2.0
"""The base class of compressors, the library's and users' own.

A compressor sums tensors over the replicas. For a mean, each replica's tensors are
scaled to its share beforehand, with weights or without. A compressor builds its
communication from the primitives that its Link offers, in the step of one replica at a
time, as a user would in step_fn; so it works wherever they do.

Only floating tensors are compressed; others are reduced without a compressor.
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
    """The result of a compressed sum: what `Compressor.reduce` returns.

    Example:
        >>> from replicator import compressors
        >>> class Rounded(compressors.Compressor):
        ...     def reduce(self, tensors, link):
        ...         sent = [tf.round(tensor) for tensor in tensors]
        ...         return compressors.Sums(totals=link.sum(sent), sent=sent)
        >>> def step_fn():
        ...     return repl.all_reduce(tf.constant([0.8, 2.1]), compressor=Rounded())
        >>> repl.run(step_fn)[0].numpy()
        array([2., 4.], dtype=float32)

    Attributes:
        totals: The sums as the replicas receive them, the same on all; `totals[k]` has
            the shape and dtype of the k-th tensor.
        sent: This replica's contributions, of the same shapes and dtypes; those of all
            replicas add up to `totals`. Error feedback keeps the difference from what
            it was asked to send.
    """

    totals: Sequence[tf.Tensor]
    sent: Sequence[tf.Tensor]


class Compressor:
    """Shrinks the tensors that replicas sum while they travel: the base class.

    To write a compressor, subclass this and define `compress` and `decompress`. The
    compressed tensor goes to all replicas, which decompress and sum. A compressor that
    can sum with less communication defines `reduce` instead of both. It holds no state
    itself: what must last from step to step is in variables, which a Link creates.

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
        rows: The dtype in which rows of sparse gradients are sent; None: unchanged.
        owes: Whether it keeps what it has not sent, to send it later.
    """

    rows: ClassVar[tf.DType | None] = None
    owes: ClassVar[bool] = False

    def compress(self, tensor: tf.Tensor) -> Any:
        """Returns the payload to send for a tensor.

        Example:
            >>> class Tenths(replicator.compressors.Compressor):
            ...     def compress(self, tensor):
            ...         return tf.cast(tf.round(10 * tensor), tf.int8)
            >>> Tenths().compress(tf.constant([0.33, -2.0])).numpy()
            array([  3, -20], dtype=int8)

        Args:
            tensor: A floating tensor of this replica, of any shape and at least 32
                bits.

        Returns:
            A nest of tensors, of the same dtypes and shapes on all replicas.

        Raises:
            ArgumentError: The class defines neither this nor `reduce`.
        """
        raise self._lacks("compress")

    def decompress(self, payload: Any, shape: tf.Tensor) -> tf.Tensor:
        """Restores a tensor from a replica's payload.

        The ops' results must depend on nothing but the payload, so that all replicas
        restore the same tensor.

        Example:
            >>> class Tenths(replicator.compressors.Compressor):
            ...     def compress(self, tensor):
            ...         return tf.cast(tf.round(10 * tensor), tf.int8)
            ...     def decompress(self, payload, shape):
            ...         return tf.cast(payload, tf.float32) / 10
            >>> def step_fn():
            ...     x = tf.constant([0.33, -2.0])
            ...     return repl.all_reduce(x, compressor=Tenths())
            >>> repl.run(step_fn)[0].numpy()
            array([ 0.6, -4. ], dtype=float32)

        Args:
            payload: What `compress` returned on that replica.
            shape: The tensor's shape: int32 of shape [rank].

        Returns:
            A tensor of that shape; it is cast to the dtype of the compressed one.

        Raises:
            ArgumentError: The class defines neither this nor `reduce`.
        """
        raise self._lacks("decompress")

    def _lacks(self, method: str) -> errors.ArgumentError:
        return errors.ArgumentError(
            f"the compressor {type(self).__name__} has no method `{method}`.",
            fix="define `compress` and `decompress`, or `reduce`.",
        )

    def reduce(self, tensors: Sequence[tf.Tensor], link: Link) -> Sums:
        """Sums tensors over the replicas.

        By default, gathers the payloads of all replicas.

        Example:
            >>> from replicator import compressors
            >>> class FirstRow(compressors.Compressor):
            ...     def reduce(self, tensors, link):
            ...         rows = [tensor[:1] for tensor in tensors]
            ...         totals, sent = zip(*map(self._padded, link.sum(rows), rows))
            ...         return compressors.Sums(totals, sent)
            ...     def _padded(self, *tensors):
            ...         return [tf.pad(tensor, [[0, 1], [0, 0]]) for tensor in tensors]
            >>> def step_fn():
            ...     return repl.all_reduce(tf.ones([2, 3]), compressor=FirstRow())
            >>> print(repl.run(step_fn)[0].numpy())
            [[2. 2. 2.]
             [0. 0. 0.]]

        Args:
            tensors: At least one dense floating tensor of any shape, of at least 32
                bits. For a mean, they are scaled to this replica's share.
            link: Communicates and holds state for the compressor.

        Returns:
            The sums, and this replica's contributions to them.

        Raises:
            ArgumentError: The class defines neither this nor the other two methods, or
                what these return does not fit.
        """
        payloads = [self.compress(tensor) for tensor in tensors]
        gathered = link.gather(payloads)
        totals, sent = [], []
        for tensor, payload, stacked in zip(tensors, payloads, gathered, strict=True):
            parts = [
                self._restored(
                    tf.nest.map_structure(lambda t, n=n: t[n], stacked), tensor
                )
                for n in range(link.size)
            ]
            # Not a chain of additions: TensorFlow would reorder it.
            totals.append(tf.reduce_sum(tf.stack(parts), 0))
            sent.append(self._restored(payload, tensor))
        return Sums(totals, sent)

    def _restored(self, payload: Any, tensor: tf.Tensor) -> tf.Tensor:
        """Decompresses a payload to the tensor's dtype; checks the shape."""
        value = self.decompress(payload, shape_of(tensor))
        if value is None:
            raise errors.ArgumentError(
                f"decompress of {type(self).__name__} returned None.",
                fix="return the tensor that it restores.",
            )
        restored = tf.cast(value, tensor.dtype)
        if not restored.shape.is_compatible_with(tensor.shape):
            raise errors.ArgumentError(
                f"decompress of {type(self).__name__} returned a tensor of shape "
                f"{restored.shape} for one of shape {tensor.shape}.",
                fix="return a tensor of the original shape.",
            )
        return restored


def checked(compressor: Compressor, tensors: Sequence[tf.Tensor], result: Any) -> Sums:
    """Checks what a compressor's `reduce` returned, since it may be a user's class.

    Args:
        compressor: The compressor.
        tensors: The tensors passed to `reduce`.
        result: What it returned.

    Returns:
        The result.

    Raises:
        ArgumentError: The result is not a Sums of tensors like these.
    """
    sums = Sums(list(getattr(result, "totals", ())), list(getattr(result, "sent", ())))
    if all(
        len(values) == len(tensors) and all(map(_is_like, values, tensors))
        for values in (sums.totals, sums.sent)
    ):
        return sums
    raise errors.ArgumentError(
        f"reduce of {type(compressor).__name__} returned {errors.repr_of(result)}.",
        fix="return a Sums whose `totals` and `sent` match the tensors.",
    )


def _is_like(value: Any, tensor: tf.Tensor) -> bool:
    return (
        tf.is_tensor(value)
        and value.dtype == tensor.dtype
        and value.shape.is_compatible_with(tensor.shape)
    )


def shape_of(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's shape, as a constant if it is static."""
    if tensor.shape.is_fully_defined():
        return tf.constant(tensor.shape.as_list(), tf.int32)
    return tf.shape(tensor)
