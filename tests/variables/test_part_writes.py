# SPDX-License-Identifier: Apache-2.0
"""Writes of rows and slices do the same to partitioned variables as to whole ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests.variables import parted

INITIAL = np.random.RandomState(0).uniform(1, 2, [9, 4]).astype(np.float32)
ROWS = tf.IndexedSlices(
    tf.constant(np.random.RandomState(1).uniform(1, 2, [4, 4]), tf.float32),
    tf.constant([8, 0, 3, 2]),
)


def check(axis: int, write: Any) -> None:
    """Compares a write's effect on a partitioned variable and on a plain one."""
    with parted.replicas(2, parted.InParts(2, axis)).context():
        v = tf.Variable(INITIAL)
    plain = tf.Variable(INITIAL)
    write(v)
    write(plain)
    np.testing.assert_allclose(v.numpy(), plain.numpy(), rtol=1e-5)
    for part in v.parts:
        for component in part.components:
            np.testing.assert_array_equal(component, part)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("how", "add sub update max min mul div".split())
def test_rows(how: str, axis: int) -> None:
    check(axis, lambda v: getattr(v, f"scatter_{how}")(ROWS))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("how", "add sub update max min".split())
def test_slices(how: str, axis: int) -> None:
    write = f"scatter_nd_{how}"
    check(axis, lambda v: getattr(v, write)([[8, 1], [0, 2]], [5.0, -5.0]))


@pytest.mark.parametrize("axis", [0, 1])
def test_ranges_and_batches(axis: int) -> None:
    check(axis, lambda v: v[2:4, 1].assign([7.0, 8.0]))
    two = tf.IndexedSlices(tf.ones([9, 2]), tf.constant([[1, 2]] * 9))
    check(axis, lambda v: v.batch_scatter_update(two))


def test_what_is_no_rows_is_refused() -> None:
    with parted.replicas(2).context():
        v = tf.Variable(INITIAL, name="table")
    message = "(?s)scatter_add of variable table:0.*was given.*Fix: it takes tf.Indexed"
    with pytest.raises(replicator.ArgumentError, match=message):
        v.scatter_add(tf.ones([9, 4]))


def test_functions_of_v1_are_refused_by_name() -> None:
    """They write by the handle of the whole, which has no value behind it."""
    with parted.replicas(2, parted.InParts(2, 0)).context():
        v = tf.Variable(INITIAL)
    with pytest.raises(replicator.ContextError, match="own method scatter_add"):
        tf.compat.v1.scatter_add(v, [0], INITIAL[:1])
