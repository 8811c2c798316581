"""Sums of gradients over several steps, on each replica its own.

Used by gradients.py, which decides what is added up, and when a sum is used and
cleared. Nothing here communicates.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import tensorflow as tf

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass
class Accumulator:
    """The sum of one variable's gradients over steps, on each replica its own.

    Dense sums have one variable, shaped as the gradient; sparse ones keep all rows:
    values [rows, ...] and indices [rows].
    """

    variables: list[tf.Variable]

    @classmethod
    def like(cls, gradient: Gradient, name: str) -> Accumulator:
        """Creates the accumulator of a gradient, with zeros or no rows in it."""
        dtype = gradient.dtype
        if not isinstance(gradient, tf.IndexedSlices):
            return cls([_local_variable(name, gradient.shape, dtype, gradient.shape)])
        rows = gradient.values.shape[1:]
        return cls(
            [
                _local_variable(name, [0, *rows], dtype, [None, *rows]),
                _local_variable(name, [0], gradient.indices.dtype, [None]),
            ]
        )

    def add(self, gradient: Gradient) -> Gradient:
        """Adds a gradient; returns the sum."""
        if isinstance(gradient, tf.IndexedSlices):
            kept, indices = self.variables
            return tf.IndexedSlices(
                kept.assign(tf.concat([kept, gradient.values], 0)).read_value(),
                indices.assign(tf.concat([indices, gradient.indices], 0)).read_value(),
                gradient.dense_shape,
            )
        return self.variables[0].assign_add(gradient).read_value()

    def clear(self) -> list[Any]:
        """Sets the sum to zero; returns what has to be waited for."""
        sparse = len(self.variables) > 1
        return [
            v.assign(
                v.read_value()[:0] if sparse else tf.zeros_like(v), read_value=False
            )
            for v in self.variables
        ]


def _local_variable(name: str, size: Any, dtype: Any, shape: Any) -> tf.Variable:
    """Creates a variable whose components are each replica's own.

    In a tf.Graph it is a local variable, as those of metrics are: initialised by
    `local_variables_initializer` (a MonitoredSession does), and in no checkpoint, so
    that checkpoints are those of the plain optimizer.
    """
    with tf.init_scope():
        return tf.compat.v1.Variable(
            lambda: tf.zeros(size, dtype),
            shape=tf.TensorShape(shape),
            dtype=dtype,
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            name=name,
            use_resource=True,
        )
