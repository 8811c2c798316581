# SPDX-License-Identifier: Apache-2.0
"""Rows of a tensor in parts: which part has which, and all of them joined again.

Pure functions of tensors and sizes, for variables and for passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

Reader = Callable[[tf.Tensor], tf.Tensor]


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Returns where each part begins."""
    return [sum(sizes[:k]) for k in range(len(sizes))]


def owners_of(flat: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Returns in which part each row of the whole is, an int32 [rows].

    Rows that do not exist are the first or the last part's, which refuses them.

    Args:
        flat: Rows of the whole, integers [rows].
        sizes: Of the parts, along axis 0.
    """
    owners = tf.zeros_like(flat, tf.int32)
    for bound in offsets_of(sizes)[1:]:
        owners += tf.cast(flat >= tf.constant(bound, flat.dtype), tf.int32)
    return owners


def local_rows(
    flat: tf.Tensor, owners: tf.Tensor, sizes: Sequence[int]
) -> list[tf.Tensor]:
    """Returns for each part those rows that are its, by its own numbers.

    Args:
        flat: Rows of the whole, integers [rows].
        owners: What `owners_of` returned.
        sizes: Of the parts, along axis 0.
    """
    split = tf.dynamic_partition(flat, owners, len(sizes))
    return [
        own - tf.constant(offset, flat.dtype)
        for own, offset in zip(split, offsets_of(sizes), strict=True)
    ]


def gathered(
    readers: Sequence[Reader], indices: tf.Tensor, axis: int, sizes: Sequence[int]
) -> tf.Tensor:
    """Returns rows of the whole, each read of the part that has it.

    Args:
        readers: `readers[k]` returns rows of part k.
        indices: Rows of the whole, integers of any shape.
        axis: Along which it is in parts.
        sizes: Of the parts, along that axis.

    Returns:
        A tensor of shape [*indices.shape, ...].
    """
    if axis:
        columns = [reader(indices) for reader in readers]
        # Each has the axes of the indices in place of the first one.
        return tf.concat(columns, axis - 1 + tf.rank(indices))
    flat = tf.reshape(indices, [-1])
    owners = owners_of(flat, sizes)
    places = tf.dynamic_partition(tf.range(tf.size(flat)), owners, len(sizes))
    own = local_rows(flat, owners, sizes)
    value = tf.dynamic_stitch(
        places, [reader(local) for reader, local in zip(readers, own, strict=True)]
    )
    if indices.shape.rank == 1:
        return value
    return tf.reshape(value, tf.concat([tf.shape(indices), tf.shape(value)[1:]], 0))
