# SPDX-License-Identifier: Apache-2.0
"""The end of inputs: last rounds that lack elements, and what happens to them.

In a round each replica gets one element. The elements of an incomplete last round are
dropped, with one warning, or the round is padded with empty batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.inputs import moving, places
from replicator.inputs.shards import Shard, batch_size

REMAINDERS = ("drop", "pad")


def padded(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Appends a number of empty batches to a dataset.

    Args:
        dataset: A dataset of batches.
        count: The number of batches to append; -1: infinitely many.

    Raises:
        InputError: The elements are not batches.
    """
    spec = dataset.element_spec
    check_batches(spec)
    empty_batches = tf.data.Dataset.from_tensors(0).map(
        lambda _: tf.nest.map_structure(_empty, spec)
    )
    return dataset.concatenate(empty_batches.repeat(count))


def check_batches(spec: Any) -> None:
    """Raises InputError unless elements of this spec are batches."""
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(spec)]
    if shapes and all(shape is not None and shape.rank for shape in shapes):
        return
    raise errors.InputError(
        'remainder="pad" fills the last round with empty batches, but elements of '
        f"{errors.repr_of(spec)} cannot be empty: not all of their tensors are known "
        "to have a first axis.",
        fix="batch the dataset, dataset.batch(1) if need be.",
    )


def zip_padded(datasets: Sequence[tf.data.Dataset]) -> tf.data.Dataset:
    """Returns a dataset of rounds, as long as the longest of the given datasets.

    Args:
        datasets: One per replica. After its end, its elements are empty batches.
    """
    rounds = tf.data.Dataset.zip(tuple(map(_flagged, datasets)))
    rounds = rounds.take_while(
        lambda *pairs: tf.reduce_any([flag for flag, _ in pairs])
    )
    return rounds.map(lambda *pairs: tuple(element for _, element in pairs))


def _flagged(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns an infinite dataset of (whether an element is left, element)."""
    is_tuple = type(dataset.element_spec) is tuple  # tf.data unpacks tuples

    def flagged(has_element: bool) -> Any:
        return lambda *parts: (has_element, parts if is_tuple else parts[0])

    endless = padded(dataset.take(0), -1)
    return dataset.map(flagged(True)).concatenate(endless.map(flagged(False)))


def _empty(spec: Any) -> Any:
    """Returns a batch of no examples."""
    if isinstance(spec, tf.RaggedTensorSpec):
        splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
        inner = [size or 0 for size in spec.shape.as_list()[spec.ragged_rank + 1 :]]
        values = tf.zeros([0, *inner], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, splits)
    shape = [0, *(size or 0 for size in spec.shape.as_list()[1:])]
    if isinstance(spec, tf.SparseTensorSpec):
        nowhere = tf.zeros([0, len(shape)], tf.int64)
        return tf.SparseTensor(nowhere, tf.zeros([0], spec.dtype), shape)
    return tf.zeros(shape, spec.dtype)


def weighed(elements: Sequence[Any]) -> list[Shard]:
    """Returns one round's batches as shards of all their examples."""
    counts = [
        tf.convert_to_tensor(batch_size(element), tf.int32) for element in elements
    ]
    total = tf.add_n(counts)
    return [
        Shard(element, count, total)
        for element, count in zip(elements, counts, strict=True)
    ]


class Lengths:
    """The number of elements of a step's datasets, as far as it is known.

    Args:
        sited: One dataset per replica, or one that feeds all of them, with their hosts.
        num_replicas: The number of replicas.

    Attributes:
        certain: Whether every round so far was complete; a failed one may not be.
    """

    def __init__(self, sited: Sequence[moving.Sited], num_replicas: int) -> None:
        self.certain = True
        self._num_replicas = num_replicas
        self._lengths = [_length(dataset) for dataset in sited]

    @property
    def rounds(self) -> int | None:
        """The number of steps with elements; -1: infinite, None: unknown."""
        if min(self._lengths) < -1:
            return None
        if len(self._lengths) == 1:
            (length,) = self._lengths
            return length if length < 0 else length // self._num_replicas
        return min((length for length in self._lengths if length >= 0), default=-1)

    def dropped(self, last_round: int | None) -> int:
        """Returns how many elements the end drops; 0 if unknown.

        Args:
            last_round: The number of elements of the round that has just ended the
                inputs, if one dataset feeds all replicas; None: they have not ended.
        """
        lengths = self._lengths
        if len(lengths) == 1 and lengths[0] < -1:  # unknown, and feeds all replicas
            return last_round or 0
        if min(lengths) < 0:  # infinite or unknown
            return 0
        if len(lengths) == 1:
            return lengths[0] % self._num_replicas
        return sum(lengths) - len(lengths) * min(lengths)


def _length(sited: moving.Sited) -> int:
    """Returns the number of elements of a dataset; -1: infinite, -2: unknown."""
    with places.at(sited.home):
        length = tf.get_static_value(sited.dataset.cardinality())
    return -2 if length is None else int(length)


class Warner:
    """Warns once about elements that are dropped at the end of a step's inputs.

    Args:
        lengths: The lengths of the datasets.
        num_replicas: The number of elements in a round.
    """

    def __init__(self, lengths: Lengths, num_replicas: int) -> None:
        self._lengths, self._num_replicas = lengths, num_replicas
        self._has_warned = False

    def warn(self, last_round: int | None) -> None:
        """Warns if elements are dropped, once.

        Args:
            last_round: The number of elements of the round that has just ended the
                inputs; None: a graph is being built, which does not tell when they end.
        """
        ended = last_round is not None
        if ended and not self._lengths.certain and self._num_replicas > 1:
            self._warn_uncertain()
            return
        count = 0 if self._has_warned else self._lengths.dropped(last_round)
        if not count:
            return
        self._has_warned = True
        logging.warning(
            "The last %d elements of a step's inputs %s dropped: they do not fill a "
            'round of %d, one for each replica. run and build with remainder="pad" '
            "give batches without examples to the replicas that lack one (at %s).",
            count,
            "were" if ended else "will be",
            self._num_replicas,
            errors.user_line(),
        )

    def _warn_uncertain(self) -> None:
        """Warns, once, where the number of dropped elements is unknown."""
        if self._has_warned:
            return
        self._has_warned = True
        logging.warning(
            "The last elements of a step's inputs may have been dropped, if they did "
            "not fill a round of %d, one for each replica. How many is not known: an "
            "earlier call has failed, perhaps after it had taken some of its round. "
            'run and build with remainder="pad" drop none (at %s).',
            self._num_replicas,
            errors.user_line(),
        )
