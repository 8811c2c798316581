# SPDX-License-Identifier: Apache-2.0
"""Joining replicas' values: to the value of all examples together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.autodist import fetched
from replicator.autodist.kinds import SAME, Kind, Value

COUNTS = [(4,), (2, 2), (3, 0, 1), (1, 5, 2)]
# A replica's value from its examples; one device's from all of them.
OF_KIND = {
    Value(Kind.ROWS): lambda rows: rows,
    Value(Kind.MEAN): lambda rows: rows.mean(0),
    Value(Kind.MEAN, 1): lambda rows: rows.sum(0),
    Value(Kind.SAME, 1): lambda rows: np.int64(len(rows)),
    Value(Kind.MAX): lambda rows: rows.max(0),
    Value(Kind.MIN): lambda rows: rows.min(0),
}


def _fetch(value: Value, rank: int | None = None, dtype: Any = tf.float64) -> Any:
    with tf.Graph().as_default():
        shape = None if rank is None else [None] * rank
        return fetched.Fetch(tf.compat.v1.placeholder(dtype, shape), True, value)


def _dealt(counts: tuple[int, ...]) -> list[np.ndarray]:
    rows = np.random.default_rng(sum(counts)).standard_normal((sum(counts), 3))
    return np.split(rows, np.cumsum(counts)[:-1])


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("value", OF_KIND, ids=lambda value: value.said)
def test_what_is_joined_is_that_of_one_device(
    value: Value, counts: tuple[int, ...]
) -> None:
    parts = _dealt(counts)
    # Replicas without examples get a dummy to build with.
    lent = [rows if len(rows) else parts[0][:1] for rows in parts]
    values = [OF_KIND[value](rows) for rows in lent]
    joined = fetched.join(_fetch(value), values, counts)
    np.testing.assert_allclose(
        joined, OF_KIND[value](np.concatenate(parts)), rtol=1e-12
    )
    assert np.asarray(joined).dtype == np.asarray(values[0]).dtype


def test_what_is_the_same_is_that_of_one_replica() -> None:
    assert fetched.join(_fetch(SAME), [5], None) == 5
    assert fetched.join(_fetch(Value(Kind.DRAWN)), [5, 6], (1, 1)) == 5
    with tf.Graph().as_default():
        op = fetched.Fetch(tf.no_op(), True, SAME)
    assert fetched.join(op, [None, None], (1, 1)) is None


@pytest.mark.parametrize("kind", [Kind.UNKNOWN, Kind.RATIO])
def test_a_number_of_which_nothing_is_known_is_the_weighed_mean(kind: Kind) -> None:
    values = [np.float32(1), np.float32(4), np.float32(100)]
    joined = fetched.join(_fetch(Value(kind), 0, tf.float32), values, (1, 2, 0))
    assert joined == np.float32(3) and joined.dtype == np.float32


def test_without_counts_replicas_weigh_alike() -> None:
    assert (
        fetched.join(_fetch(Value(Kind.MEAN)), [np.float64(1), np.float64(3)], None)
        == 2
    )


@pytest.mark.parametrize("counts", [(2, 2), (4, 1)])
def test_rows_that_belong_to_no_examples_are_refused(counts: tuple[int, int]) -> None:
    values = [np.zeros([3, 2]), np.zeros([3, 2])]
    with pytest.raises(
        errors.ArgumentError,
        match=r"(?s)has 3 rows on a replica of \d examples.*Fix: fetch a tensor that",
    ):
        fetched.join(_fetch(Value(Kind.ROWS)), values, counts)


def test_summaries_have_the_means_of_their_numbers() -> None:
    with tf.Graph().as_default():
        summary = tf.compat.v1.summary.scalar("loss", tf.constant(0.0))
        fetch = fetched.Fetch(summary, True, Value(Kind.UNKNOWN))

    def of(number: float) -> bytes:
        value = tf.compat.v1.Summary.Value(tag="loss", simple_value=number)
        return bytes(tf.compat.v1.Summary(value=[value]).SerializeToString())

    joined = fetched.join(fetch, [of(1.0), of(4.0)], (2, 1))
    assert joined == of(2.0)
    assert fetched.join(fetch, [of(1.0), of(1.0)], (2, 1)) == of(1.0)
    with pytest.raises(errors.ArgumentError, match="is a string that differs"):
        fetched.join(fetch, [b"no summary", b"nor this"], (2, 1))
