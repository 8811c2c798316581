# SPDX-License-Identifier: Apache-2.0
"""Placements of rows, any number of them, that each replica collects for itself.

They hold gradients summed over several steps, and what a compressor has not sent yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.variables.placement import Placement, Write

_ALL = 2**31 - 1  # rows
_MEAN = tf.VariableAggregation.MEAN


@dataclasses.dataclass(frozen=True)
class Rows(Placement):
    """Rows that each replica collects, in any number: sums of sparse gradients.

    Attributes:
        aggregation: MEAN or SUM: how rows are combined over the replicas.
    """

    aggregation: tf.VariableAggregation

    differs = True
    grows = True

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the rows of all components, concatenated."""
        rows = tf.concat(values, 0)
        return rows / len(values) if self.aggregation == _MEAN else rows

    def written(self, value: Any, write: Write) -> Any:
        """Gives all rows to the first replica; the others start with none."""
        value = write.as_tensor(value)
        value = value[: write.own(lambda r: 0 if r else _ALL)]
        count = len(write.variable.outside)
        return value * count if self.aggregation == _MEAN else value


@dataclasses.dataclass(frozen=True)
class Owed(Placement):
    """A compressor's residual: each replica holds one row, and only their sum matters.

    Writing gives each replica its own row back. A value with the rows of another number
    of replicas goes to the first, summed.

    Attributes:
        replicas: The number of replicas.
    """

    replicas: int

    differs = True
    grows = True
    is_aggregated = True  # no single replica holds all rows

    def read(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the rows of all components, concatenated."""
        return tf.concat(values, 0)

    def written(self, value: Any, write: Write) -> Any:
        """Returns the replica's own row; or the sum for the first, zeros for others."""
        value = write.as_tensor(value)
        rows = tf.shape(value)[0]
        replica_id = write.own(int)
        own_row = tf.gather(value, [tf.minimum(replica_id, rows - 1)])
        total = tf.reduce_sum(value, 0, keepdims=True)
        share_of_sum = tf.where(tf.equal(replica_id, 0), total, tf.zeros_like(total))
        return tf.where(tf.equal(rows, self.replicas), own_row, share_of_sum)
