# SPDX-License-Identifier: Apache-2.0
"""Writes of rows and slices do the same to partitioned variables as to whole ones."""

from __future__ import annotations

from collections.abc import Callable
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


TWO = tf.IndexedSlices(tf.ones([9, 2]), tf.constant([[1, 2]] * 9))
WRITES: dict[str, Callable[[Any], Any]] = {
    "assign": lambda v: v.assign(2 * INITIAL),
    "assign_add": lambda v: v.assign_add(INITIAL),
    "assign_sub": lambda v: v.assign_sub(tf.constant(INITIAL)),
    **{
        f"scatter_{how}": lambda v, how=how: getattr(v, f"scatter_{how}")(ROWS)
        for how in "add sub update max min mul div".split()
    },
    **{
        name: lambda v, name=name: getattr(v, name)([[8, 1], [0, 2]], [5.0, -5.0])
        for name in (f"scatter_nd_{how}" for how in "add sub update max min".split())
    },
    "range": lambda v: v[2:4, 1].assign([7.0, 8.0]),
    "batch": lambda v: v.batch_scatter_update(TWO),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_does_what_it_does_to_a_plain_variable(name: str, axis: int) -> None:
    with parted.replicas(2, parted.InParts(2, axis)).context():
        v = tf.Variable(INITIAL)
    plain = tf.Variable(INITIAL)
    WRITES[name](v)
    WRITES[name](plain)
    np.testing.assert_allclose(v.numpy(), plain.numpy(), rtol=1e-5)
    for part in v.parts:
        for component in part.components:
            np.testing.assert_array_equal(component, part)


def test_what_is_no_rows_is_refused() -> None:
    with parted.replicas(2).context():
        v = tf.Variable(INITIAL, name="table")
    message = "(?s)scatter_add of variable table:0.*was given.*Fix: it takes tf.Indexed"
    with pytest.raises(replicator.ArgumentError, match=message):
        v.scatter_add(tf.ones([9, 4]))
