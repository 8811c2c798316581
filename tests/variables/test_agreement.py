# SPDX-License-Identifier: Apache-2.0
"""The agreed values that replicas assign; variables/ tests whole writes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator import context
from replicator.variables import agreement
from tests import helpers

A = tf.VariableAggregation
VALUES = np.array([[1.0, 8.0], [2.0, 4.0], [6.0, 6.0]], np.float32)


def _agreed(
    aggregation: A, dtype: tf.DType, updating: bool = False
) -> list[np.ndarray]:
    """Returns the values that three replicas assign."""
    repl = helpers.make(3)
    with repl.context():
        variable = tf.Variable(tf.zeros([2], dtype), aggregation=aggregation)

    def step() -> tf.Tensor:
        replica = context.require("test")
        own = tf.cast(tf.gather(VALUES, replica.replica_id), dtype)
        if updating:
            with replica.equal_updates():
                return agreement.agree(variable, own, replica)
        return agreement.agree(variable, own, replica)

    return [value.numpy() for value in repl.run(step)]


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (A.NONE, VALUES.sum(0) / 3),
        (A.MEAN, VALUES.sum(0) / 3),
        (A.SUM, VALUES.sum(0)),
        (A.ONLY_FIRST_REPLICA, VALUES[0]),
    ],
    ids=["none", "mean", "sum", "first"],
)
def test_floats_are_aggregated_as_the_variable_asks(aggregation, expected) -> None:
    for value in _agreed(aggregation, tf.float32):
        np.testing.assert_array_equal(value, expected)


def test_integers_without_an_aggregation_are_taken_as_equal() -> None:
    np.testing.assert_array_equal(_agreed(A.NONE, tf.int32), VALUES.astype(np.int32))


def test_updates_that_are_equal_by_construction_pass_unchanged() -> None:
    np.testing.assert_array_equal(_agreed(A.SUM, tf.float32, updating=True), VALUES)
