# SPDX-License-Identifier: Apache-2.0
"""Splits a global batch into one shard per replica, along the first axis.

Pure functions of a nest of tensors: they only add ops to the default graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from replicator import errors
from replicator.graph.ir import shapes


class Shard(NamedTuple):
    """One replica's part of a global batch.

    Attributes:
        element: The batch's nest, with a part of each tensor. Leaves without an axis to
            split along (scalars, None) are in every shard.
        count: The number of examples in it, an int32 scalar; may be 0.
        total: The number of examples in the batch, an int32 scalar.
    """

    element: Any
    count: tf.Tensor
    total: tf.Tensor

    @property
    def share(self) -> tf.Tensor:
        """The shard's share of the batch's examples, a float64 scalar; 0 of none."""
        count = tf.cast(self.count, tf.float64)
        return tf.math.divide_no_nan(count, tf.cast(self.total, tf.float64))


def split(batch: Any, num_replicas: int) -> list[Shard]:
    """Splits a global batch into shards whose sizes differ by at most one.

    The first shards are the larger ones, so only a batch of fewer examples than
    replicas leaves some empty, the last. Concatenated, they are the batch.

    Args:
        batch: A nest of dense, ragged and sparse tensors with the same first dimension,
            and of scalars and None.
        num_replicas: The number of shards.

    Returns:
        `shards[r]` is for replica r.

    Raises:
        InputError: Nothing in the batch has a first axis, or tensors are known to
            differ in its size. Sizes unknown until run time raise InvalidArgumentError
            then.
    """
    size = batch_size(batch)
    sizes, counts = _sizes(size, num_replicas)
    leaves = [
        _split_leaf(leaf, sizes, counts, num_replicas) for leaf in _flatten(batch)
    ]
    total = tf.convert_to_tensor(size, tf.int32)
    return [
        Shard(
            tf.nest.pack_sequence_as(batch, [leaf[r] for leaf in leaves]),
            tf.convert_to_tensor(count, tf.int32),
            total,
        )
        for r, count in enumerate(counts)
    ]


def batch_size(batch: Any) -> int | tf.Tensor:
    """Returns the number of examples in a batch: an int if it is known statically.

    Args:
        batch: As for `split`.

    Raises:
        InputError: As for `split`.
    """
    leaves = [leaf for leaf in _flatten(batch) if not _is_whole(leaf)]
    if not leaves:
        raise errors.InputError(
            f"a batch of {errors.repr_of(_specs(batch))} cannot be split over the "
            "replicas: nothing in it has a first axis.",
            fix="feed batches of examples, e.g. dataset.batch(64).",
        )
    sizes = {leaf.shape.as_list()[0] for leaf in leaves} - {None}
    if len(sizes) > 1:
        raise errors.InputError(
            f"a batch of {errors.repr_of(_specs(batch))} cannot be split over the "
            "replicas: its tensors differ in their first dimension, "
            f"{', '.join(map(str, sorted(sizes)))}.",
            fix="give every tensor of a batch one row per example; a value that all "
            "examples share belongs in step_fn or the model, or must be a scalar.",
        )
    if sizes:
        return int(sizes.pop())
    return _checked_size(leaves)


def _sizes(size: Any, num_replicas: int) -> tuple[Any, list[Any]]:
    """Returns the number of examples per replica, as one tensor and as scalars.

    Both are lists of ints if `size` is one.
    """
    if isinstance(size, int):
        counts = [count(size, r, num_replicas) for r in range(num_replicas)]
        return counts, counts
    sizes = count(size, tf.range(num_replicas), num_replicas)
    return sizes, tf.unstack(sizes, num_replicas)


def count(size: Any, replica_id: Any, num_replicas: int) -> Any:
    """Returns a replica's number of examples out of `size`: the first get one more."""
    return (size + num_replicas - 1 - replica_id) // num_replicas


def _checked_size(leaves: list[Any]) -> tf.Tensor:
    """Returns the first dimension of tensors, asserted to be the same for all."""
    first, *others = [_rows(leaf) for leaf in leaves]
    line = errors.user_line()
    checks = [
        tf.debugging.Assert(
            tf.equal(first, other),
            [
                "a batch cannot be split over the replicas: its tensors differ in "
                "their first dimension, the number of examples.",
                f"at {line}",
                "numbers of examples:",
                first,
                other,
                "Fix: give every tensor of a batch one row per example.",
            ],
        )
        for other in others
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(first)


def _rows(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def _split_leaf(leaf: Any, sizes: Any, counts: Any, num_replicas: int) -> list[Any]:
    """Returns each replica's part of one tensor.

    Args:
        leaf: The tensor.
        sizes: Each replica's number of rows, as one tensor or a list of ints.
        counts: The same, as a list of scalars.
        num_replicas: The number of replicas.
    """
    if _is_whole(leaf):
        return [leaf] * num_replicas
    if isinstance(leaf, tf.RaggedTensor):
        starts = _starts(counts)
        pairs = zip(starts, counts, strict=True)
        return [leaf[start : start + count] for start, count in pairs]
    if isinstance(leaf, tf.SparseTensor):
        return _split_sparse(leaf, counts)
    return tf.split(leaf, sizes, axis=0, num=num_replicas)


def _split_sparse(leaf: tf.SparseTensor, counts: Any) -> list[tf.SparseTensor]:
    """Returns each replica's rows of a sparse tensor; the static shape is kept."""
    other_sizes = leaf.dense_shape[1:]
    parts = []
    for start, count in zip(_starts(counts), counts, strict=True):
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(other_sizes)], 0)
        size = tf.concat([[tf.cast(count, tf.int64)], other_sizes], 0)
        part = tf.sparse.slice(leaf, begin, size)
        # tf.sparse.slice gives an empty slice a shape of all zeros.
        part = tf.SparseTensor(part.indices, part.values, size)
        rows = count if isinstance(count, int) else None
        if leaf.shape.rank is not None and tf.is_symbolic_tensor(part.values):
            part.set_shape(shapes.with_rows(leaf.shape, rows))
        parts.append(part)
    return parts


def _starts(counts: Any) -> list[Any]:
    """Returns the first row of each replica."""
    starts: list[Any] = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    return starts


def _is_whole(leaf: Any) -> bool:
    """Whether a leaf goes to all replicas as it is, without an axis to split along."""
    return leaf is None or leaf.shape.rank == 0


def _flatten(batch: Any) -> list[Any]:
    """Returns a batch's leaves as tensors or None."""
    composite = (tf.RaggedTensor, tf.SparseTensor)
    return [
        leaf if leaf is None or isinstance(leaf, composite) else _tensor(leaf, batch)
        for leaf in tf.nest.flatten(batch)
    ]


def _tensor(leaf: Any, batch: Any) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        raise errors.InputError(
            f"a batch holds {type(leaf).__name__} {errors.repr_of(leaf)}, which cannot "
            "be split over the replicas.",
            fix="feed dense, ragged and sparse tensors.",
        ) from error
    if tensor.shape.rank is None:
        raise errors.InputError(
            f"a batch holds {errors.repr_of(leaf)}, whose rank is unknown: it "
            "cannot be "
            "split over the replicas.",
            fix="set its shape in the input pipeline, tensor.set_shape([None, ...]) or "
            "tf.ensure_shape.",
        )
    return tensor


def _specs(batch: Any) -> Any:
    """Describes a batch for messages."""
    return tf.nest.map_structure(
        lambda leaf: (
            None
            if leaf is None
            else tf.TensorSpec(leaf.shape, leaf.dtype)
            if isinstance(leaf, tf.Tensor)
            else type(leaf).__name__
        ),
        batch,
    )
