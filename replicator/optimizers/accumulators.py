# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over several steps, on each replica its own.

Used by gradients.py, which decides what is added up, and when a sum is used and
cleared. Nothing here communicates.

Checkpoints hold one value for all replicas, and load on any number of them: where the
update is by the mean over the replicas, the mean of their sums, which each of them gets
back; else the sum, which replica 0 gets back. Sparse sums are saved as the rows of all
replicas, and restored on replica 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from replicator import context
from replicator.variables.collected import Rows
from replicator.variables.numbered import Numbered

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


class Sums(Numbered):
    """All accumulators of an optimizer, for its checkpoints.

    They are found by names that are the same in another process, and on another number
    of replicas: by what the gradients look like, and not by the names of variables,
    which count how often a layer of a kind was made.
    """

    def __init__(self) -> None:
        super().__init__(name="sums")

    def create(self, addends: Sequence[Gradient], op: str, name: str) -> Accumulators:
        """Creates the accumulators of one call of an optimizer.

        Args:
            addends: What will be added up.
            op: "mean" or "sum" over the replicas.
            name: The optimizer's, for the names of variables.

        Returns:
            One for each of `addends`, and one that counts the steps.
        """
        how = (
            tf.VariableAggregation.MEAN if op == "mean" else tf.VariableAggregation.SUM
        )
        with tf.name_scope(name), tf.name_scope("accumulator"):
            group = self.group(repr((op, *map(facts_of, addends))))
            steps = Accumulator.like(tf.constant(0, tf.int64), group, "steps", None)
            return [
                Accumulator.like(gradient, group, f"sum_{k}", how)
                for k, gradient in enumerate(addends)
            ], steps


def facts_of(gradient: Gradient) -> tuple[Any, ...]:
    """Returns what a gradient looks like on any number of replicas."""
    if isinstance(gradient, tf.IndexedSlices):
        rows = gradient.values.shape[1:].as_list()
        return gradient.dtype.name, gradient.indices.dtype.name, rows
    return gradient.dtype.name, None, gradient.shape.as_list()


@dataclasses.dataclass
class Accumulator:
    """The sum of one variable's gradients over steps, on each replica its own.

    Dense sums have one variable, shaped as the gradient; sparse ones keep all rows:
    values [rows, ...] and indices [rows].
    """

    variables: list[tf.Variable]

    @classmethod
    def like(
        cls, gradient: Gradient, group: tf.Module, name: str, how: Any
    ) -> Accumulator:
        """Creates the accumulator of a gradient, with zeros or no rows in it.

        Args:
            gradient: Is added to it.
            group: Where checkpoints find it.
            name: Within the group.
            how: The tf.VariableAggregation that checkpoints hold; None for what is
                equal on all replicas.
        """

        def variable(suffix: str, shape: Any, dtype: tf.DType, how: Any) -> tf.Variable:
            return _variable(group, f"{name}{suffix}", shape, dtype, how)

        if not isinstance(gradient, tf.IndexedSlices):
            return cls([variable("", gradient.shape, gradient.dtype, how)])
        shape = [None, *gradient.values.shape[1:]]
        values = variable("_values", shape, gradient.dtype, how)
        indices = variable(
            "_indices", [None], gradient.indices.dtype, tf.VariableAggregation.SUM
        )
        return cls([values, indices])

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


def _variable(
    group: tf.Module, name: str, shape: Any, dtype: tf.DType, how: Any
) -> tf.Variable:
    """Creates a variable whose components are each replica's own, if `how` is given.

    Args:
        group: Where checkpoints find it; restores it, if one waits for it.
        name: Within the group.
        shape: Beginning with None for rows, of which there are none yet.
        dtype: Its dtype.
        how: The tf.VariableAggregation of the components; None: they are equal.
    """
    sizes = tf.TensorShape(shape).as_list()
    rows = bool(sizes) and sizes[0] is None
    own: dict[str, Any] = {}
    if how is not None:
        own["synchronization"] = tf.VariableSynchronization.ON_READ
        own["aggregation"] = tf.VariableAggregation.NONE if rows else how
    empty = [n or 0 for n in sizes]
    with tf.init_scope():
        variable = tf.compat.v1.Variable(
            lambda: tf.zeros(empty, dtype),
            shape=tf.TensorShape(sizes),
            dtype=dtype,
            trainable=False,
            **own,
            name=f"{group.name}/{name}",
            use_resource=True,
        )
        with context.building(None):
            if rows:
                variable.storage.placement = Rows(how)
            setattr(group, name, variable)
    return variable


def cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    """Casts a gradient, if it has another dtype."""
    return gradient if gradient.dtype == dtype else tf.cast(gradient, dtype)


def wide(gradient: Gradient) -> Gradient:
    """Returns what to add up: 16-bit floats are added up in float32."""
    half = gradient.dtype in (tf.float16, tf.bfloat16)
    return cast(gradient, tf.float32) if half else gradient


def scaled(gradient: Gradient, factor: Any) -> Gradient:
    """Multiplies a gradient; a factor of 0 gives 0 whatever the gradient holds."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            scaled(gradient.values, factor), gradient.indices, gradient.dense_shape
        )
    if isinstance(factor, float):  # which tf.cast would round to float32 first
        factor = tf.constant(factor, gradient.dtype)
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


Accumulators: TypeAlias = tuple[list[Accumulator], Accumulator]
