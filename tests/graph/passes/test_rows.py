# SPDX-License-Identifier: Apache-2.0
"""Rows of a tensor in parts are those of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator.graph.passes import rows


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
    sizes = [2, 1, 4]
    parts = np.split(whole, [2, 3], axis)
    readers = [lambda own, part=part: tf.gather(part, own) for part in parts]
    found = rows.gathered(readers, tf.constant(indices, tf.int32), axis, sizes)
    np.testing.assert_array_equal(found, whole[np.array(indices, int)])
