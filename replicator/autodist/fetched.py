# SPDX-License-Identifier: Apache-2.0
"""Fetched values: joins those of the replicas to the value of all examples.

A value equal on all replicas is that of one; tensors with a row per example are
concatenated; a value over the examples is what it would be on one device, see kinds.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator.autodist import handles, kinds, stamping
from replicator.autodist.kinds import Kind, Value
from replicator.autodist.shares import Source
from replicator.autodist.stamping import Places

Values = Sequence[Any]  # one per replica
SUMMARIES = ("ScalarSummary", "MergeSummary", "HistogramSummary", "ImageSummary")


@dataclasses.dataclass(frozen=True)
class Fetch:
    """A fetched tensor or op.

    Attributes:
        what: The tensor or op of the program.
        everywhere: Whether all replicas have to run it.
        value: What the replicas' values are.
        source: The op that deals the elements that it depends on, if any.
        whole: Its value over all examples, if the graph computes that.
    """

    what: Any
    everywhere: bool
    value: Value
    source: Source = None
    whole: tf.Tensor | None = None

    def on(self, places: Sequence[Places]) -> list[Any]:
        """Returns its copies on the replicas that have to run it."""
        if handles.is_made_by(self.what):
            return []  # there is nothing to run
        if self.whole is not None:
            return [self.whole]
        used_places = places if self.everywhere else places[:1]
        if isinstance(self.what, tf.Operation):
            return [replica_places[self.what] for replica_places in used_places]
        return [
            stamping.of(replica_places, self.what) for replica_places in used_places
        ]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the fetches.

    Attributes:
        given: The user's tensor, op, variable or name.
        parts: Its fetches: one, or one per component of a sparse value.
    """

    given: Any
    parts: tuple[Fetch, ...]

    def joined(
        self, values: Sequence[Values], counts: Sequence[Sequence[float] | None]
    ) -> Any:
        """Returns the value for all examples.

        Args:
            values: For each part, the values of the replicas.
            counts: For each part, how many examples each replica has.
        """
        if isinstance(self.given, tf.SparseTensor):
            return _sparse(self.parts, values, counts[0])
        parts = [join(*part) for part in zip(self.parts, values, counts, strict=True)]
        if isinstance(self.given, tf.IndexedSlices):
            return tf.compat.v1.IndexedSlicesValue(*parts, dense_shape=None)
        return parts[0]


def _sparse(
    parts: Sequence[Fetch], values: Sequence[Values], counts: Sequence[float] | None
) -> Any:
    """Concatenates the rows of sparse tensors."""
    new_value = tf.compat.v1.SparseTensorValue
    sparse_values = [new_value(*sparse) for sparse in zip(*values, strict=False)]
    if all(kinds.is_same(part.value) for part in parts):
        return sparse_values[0]
    if counts is not None:
        sparse_values = [
            sparse for sparse, n in zip(sparse_values, counts, strict=True) if n
        ]
    first_row, indices = 0, []
    for sparse in sparse_values:
        offset = np.zeros(sparse.indices.shape[1], np.int64)
        offset[:1] = first_row
        indices.append(sparse.indices + offset)
        first_row += sparse.dense_shape[0]
    shape = np.max([sparse.dense_shape for sparse in sparse_values], axis=0)
    shape[0] = first_row
    return new_value(
        np.concatenate(indices),
        np.concatenate([sparse.values for sparse in sparse_values]),
        shape,
    )


def join(
    fetch: Fetch,
    values: Values,
    counts: Sequence[float] | None,
) -> Any:
    """Returns the value for all examples.

    Args:
        fetch: What was fetched.
        values: The replicas' values; a single one if that is enough.
        counts: How many examples each replica has; None if equally many.

    Raises:
        ArgumentError: The number of rows does not fit the number of examples.
    """
    value = fetch.value
    if isinstance(fetch.what, tf.Operation):
        return None
    if fetch.whole is not None:
        return values[0]
    if kinds.is_same(value) or value.kind is Kind.DRAWN:
        return values[0]
    if fetch.what.op.type in SUMMARIES or fetch.what.dtype == tf.string:
        if not fetch.what.shape.rank and np.ndim(values[0]) == 0:
            return _summary(fetch.what, values, counts)
    arrays = [np.asarray(replica_value) for replica_value in values]
    if value.kind is Kind.ROWS or (arrays[0].ndim and value.kind is Kind.UNKNOWN):
        return _rows(fetch, arrays, counts)
    if value.kind in (Kind.MAX, Kind.MIN):
        choose = np.maximum if value.kind is Kind.MAX else np.minimum
        nonempty = [n for n in range(len(arrays)) if counts is None or counts[n]]
        dtype = arrays[0].dtype
        return _scalar(np.asarray(choose.reduce([arrays[n] for n in nonempty])), dtype)
    power = value.power if value.kind in (Kind.SAME, Kind.MEAN) else 0
    return _mean(arrays, counts, power)


def _scalar(array: np.ndarray, dtype: Any) -> Any:
    if np.dtype(dtype).kind in "iu" and array.dtype.kind == "f":
        array = np.round(array)
    array = array.astype(dtype, copy=False)
    return array if array.ndim else array[()]


def _mean(
    arrays: Sequence[np.ndarray], counts: Sequence[float] | None, power: float = 0
) -> Any:
    """Returns a mean weighted by examples, without the replicas that have none.

    Args:
        arrays: The replicas' values.
        counts: How many examples each has; None if equally many.
        power: The exponent of the number of examples as a factor of the values.
    """
    weights = [1.0] * len(arrays) if counts is None else list(counts)
    total = sum(weights)
    dtype = arrays[0].dtype
    if power == 1:  # a sum, and exact
        terms = [array for array, weight in zip(arrays, weights, strict=True) if weight]
        return _scalar(np.asarray(sum(terms[1:], terms[0])), dtype)
    wide = np.result_type(dtype, np.float64)
    terms = [
        array.astype(wide) * (weight / total) ** (1 - power)
        for array, weight in zip(arrays, weights, strict=True)
        if weight
    ]
    return _scalar(np.asarray(sum(terms[1:], terms[0])), dtype)


def _rows(
    fetch: Fetch, arrays: Sequence[np.ndarray], counts: Sequence[float] | None
) -> np.ndarray:
    """Concatenates rows of examples, leaving out those of lent examples."""
    value, tensor = fetch.value, fetch.what
    if counts is None:
        return np.concatenate(arrays, value.axis)
    for array, count in zip(arrays, counts, strict=True):
        if count and array.shape[value.axis] % count and value.some is None:
            raise errors.ArgumentError(
                errors.compose(
                    f"{tensor.name} has {array.shape[value.axis]} rows on a replica of "
                    f"{int(count)} examples, not equally many for each: the replicas' "
                    "rows cannot be joined.",
                    [
                        f"created at {errors.line_of(tensor.op)}",
                        f"fetched at {errors.user_line()}",
                    ],
                    "fetch a tensor that has a row for each example.",
                )
            )
    total = sum(counts)
    nonempty_arrays = [
        _scalar(array * (n / total) ** -value.power, array.dtype)
        if value.power
        else array
        for array, n in zip(arrays, counts, strict=True)
        if n
    ]
    return np.concatenate(nonempty_arrays or arrays[:1], value.axis)


def _summary(
    tensor: tf.Tensor, values: Values, counts: Sequence[float] | None
) -> bytes:
    """Returns a summary of all examples, whose numbers are means."""
    if all(value == values[0] for value in values):
        return bytes(values[0])
    summaries = []
    for value in values:
        summary = tf.compat.v1.Summary()
        try:
            summary.ParseFromString(value)
        except Exception:  # protobuf's error for bytes that are no summary
            raise errors.ArgumentError(
                errors.compose(
                    f"{tensor.name} is a string that differs between replicas.",
                    [
                        f"created at {errors.line_of(tensor.op)}",
                        f"fetched at {errors.user_line()}",
                    ],
                    "fetch a tensor that has one for each example.",
                )
            ) from None
        summaries.append(summary)
    joined = summaries[0]
    for k, value in enumerate(joined.value):
        if value.HasField("simple_value"):
            numbers = [np.float64(other.value[k].simple_value) for other in summaries]
            value.simple_value = float(_mean([np.asarray(n) for n in numbers], counts))
    return bytes(joined.SerializeToString())
