# SPDX-License-Identifier: Apache-2.0
"""What replicas collect is all there when it is read, and after it is written."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.variables.collected import Owed, Rows
from replicator.variables.placement import Write

MEAN, SUM = tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM
ROWS = np.arange(8.0).reshape(4, 2)


def _written(placement: Any, value: Any, count: int) -> list[tf.Tensor]:
    """Returns what each replica gets of what is written."""
    variable = types.SimpleNamespace(outside=[None] * count, dtype=None)
    return [
        placement.written(
            value,
            Write(variable, r),
        )
        for r in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("how", [MEAN, SUM])
def test_rows_that_are_written_are_read_again(how: Any, count: int) -> None:
    placement = Rows(how)
    own = _written(placement, ROWS, count)
    assert [len(rows) for rows in own] == [4] + [0] * (count - 1)
    np.testing.assert_allclose(placement.read(own), ROWS)


def test_rows_of_all_replicas_are_read_in_their_order() -> None:
    own = [tf.constant(ROWS[:1]), tf.constant(ROWS[1:1]), tf.constant(ROWS[1:])]
    np.testing.assert_array_equal(Rows(SUM).read(own), ROWS)
    np.testing.assert_array_equal(Rows(MEAN).read(own), ROWS / 3)


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_that_was_owed_is_owed_on_any_number_of_replicas(
    count: int, saved: int
) -> None:
    placement = Owed(count)
    own = _written(placement, ROWS[:saved], count)
    assert [rows.shape[0] for rows in own] == [1] * count
    whole = placement.read(own)
    np.testing.assert_allclose(tf.reduce_sum(whole, 0), ROWS[:saved].sum(0))
    if saved == count:
        np.testing.assert_array_equal(whole, ROWS[:saved])
    else:
        assert not np.any(whole[1:])
