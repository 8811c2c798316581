# SPDX-License-Identifier: Apache-2.0
"""Placements of what replicas collect for themselves: any number of rows.

What sums up gradients over several steps, and what a compressor has not sent yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.variables.placement import Placement, Write

_MEAN = tf.VariableAggregation.MEAN


@dataclasses.dataclass(frozen=True)
class Rows(Placement):
    """Rows that each replica collects, as many as it likes: sums of sparse gradients.

    Attributes:
        aggregation: MEAN or SUM, of what is added up of the rows over the replicas.
    """

    aggregation: tf.VariableAggregation

    differs = True
    grows = True

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the rows of all components, one after the other."""
        rows = tf.concat(values, 0)
        return rows / len(values) if self.aggregation == _MEAN else rows

    def written(self, value: Any, write: Write) -> Any:
        """Returns all rows for the first replica; the others begin with none."""
        value = write.as_tensor(value)
        if write.replica_id:
            return value[:0]
        count = len(write.variable.outside)
        return value * count if self.aggregation == _MEAN else value


@dataclasses.dataclass(frozen=True)
class Owed(Placement):
    """What each replica owes: a row of its own, of which the sum counts.

    Each gets its own row back. If there are as many rows as other replicas had, the
    first owes the sum of all.

    Attributes:
        replicas: How many there are.
    """

    replicas: int

    differs = True
    grows = True
    is_aggregated = True  # all rows together are no replica's value

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the rows of all components, one after the other."""
        return tf.concat(values, 0)

    def written(self, value: Any, write: Write) -> Any:
        """Returns the replica's own row, or that of all for the first."""
        value = write.as_tensor(value)
        rows = tf.shape(value)[0]
        own = tf.gather(value, [tf.minimum(write.replica_id, rows - 1)])
        total = tf.reduce_sum(value, 0, keepdims=True)
        rest = tf.zeros_like(total) if write.replica_id else total
        return tf.where(tf.equal(rows, self.replicas), own, rest)
