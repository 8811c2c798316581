# SPDX-License-Identifier: Apache-2.0
"""Rows of a partitioned tensor are those of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator.graph.passes import rows
from tests import helpers


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_owners_and_local_rows(dtype: tf.DType) -> None:
    flat = tf.constant([0, 6, 3, 2, 2, 5], dtype)
    sizes = [2, 1, 4]
    owners = rows.owners_of(flat, sizes)
    assert owners.numpy().tolist() == [0, 2, 2, 1, 1, 2]
    local = [part.numpy().tolist() for part in rows.local_rows(flat, owners, sizes)]
    assert local == [[0], [0, 0], [3, 0, 2]]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("indices", [4, [], [0, 6, 3, 3], [[5, 1], [2, 0]]])
def test_gathered_rows_are_those_of_the_whole(axis: int, indices: object) -> None:
    whole = np.arange(7 * 7 * 7.0).reshape(7, 7, 7)
    parts = np.split(whole, [2, 3], axis)
    readers = [lambda own, part=part: tf.gather(part, own) for part in parts]
    layout = rows.Parts(axis, (2, 1, 4))
    actual = layout.rows(readers, tf.constant(indices, tf.int32))
    np.testing.assert_array_equal(actual, whole[np.array(indices, int)])


@pytest.mark.parametrize("shape", [[], [1], [3], [2, 2]])
@pytest.mark.parametrize("known", [True, False])
def test_rows_are_split_as_their_indices_are(shape: list[int], known: bool) -> None:
    sizes, places = [2, 1, 4], np.array([0, 6, 3, 2, 2, 5])
    whole = np.random.RandomState(0).randn(6, *shape)

    @tf.function
    def split() -> list[tf.Tensor]:
        values, flat = tf.constant(whole), tf.constant(places)
        if not known:
            values = helpers.opaque(values, [None, *shape])
            flat = helpers.opaque(flat, [None])
        return rows.split(values, flat, rows.owners_of(flat, sizes), 3)

    owners = np.array([0, 2, 2, 1, 1, 2])
    for k, own in enumerate(split()):
        np.testing.assert_array_equal(own, whole[owners == k])


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_other_rows_than_indices_are_not_split(columns: int, count: int) -> None:
    @tf.function
    def split() -> list[tf.Tensor]:
        values = helpers.opaque(tf.ones([count, columns]), [None, columns])
        flat = helpers.opaque(tf.constant([0, 1]), [None])
        return rows.split(values, flat, rows.owners_of(flat, [1, 1]), 2)

    with pytest.raises(tf.errors.InvalidArgumentError, match="partitions"):
        split()


def test_rows_and_indices_that_are_made_alike_are_as_many() -> None:
    with tf.Graph().as_default():
        indices = helpers.opaque(tf.constant([[3, 0]]), [None, None])
        values = helpers.opaque(tf.ones([2, 4]), [None, 4])
        flat, size = rows.vector(indices)
        shaped = tf.reshape(values, tf.concat([size, [4]], 0))
        assert rows.as_many(shaped, flat)
        assert not rows.as_many(values, flat)
        assert not rows.as_many(tf.reshape(values, [-1, 4]), flat)
        owners = rows.owners_of(flat, [2, 2])
        local = rows.local_rows(flat, owners, [2, 2])
        split = rows.split(values, flat, owners, 2)
        assert [rows.as_many(split[0], rows_of_part) for rows_of_part in local] == [
            True,
            False,
        ]
        assert [rows.as_many(split[1], rows_of_part) for rows_of_part in local] == [
            False,
            True,
        ]
        assert not rows.as_many(split[0][1:], local[0])


def test_a_size_that_is_left_open_says_nothing() -> None:
    with tf.Graph().as_default():
        size = tf.constant([-1])
        values, flat = (helpers.opaque(x, [None]) for x in ([1, 2], [1, 2, 3]))
        assert not rows.as_many(tf.reshape(values, size), tf.reshape(flat, size))
