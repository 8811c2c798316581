# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over several steps, one per replica.

Used by gradients.py, which decides what is summed, and when a sum is used and cleared.
Nothing here communicates.

Checkpoints hold one value for all replicas, and load on any number of them. If updates
are by the mean over the replicas, it is the mean of their sums, which each of them gets
back; otherwise it is the total, which replica 0 gets back. Sparse sums are saved as the
rows of all replicas and restored on replica 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from replicator import context, errors
from replicator.graph.ir import shapes
from replicator.variables.chooser import Description
from replicator.variables.collected import Rows
from replicator.variables.numbered import Numbered

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


class AccumulatorStore(Numbered):
    """All accumulators of an optimizer, for its checkpoints.

    Checkpoints find them by names that are the same in another process and on another
    number of replicas. The names come from the dtypes and shapes of the gradients, not
    from the names of variables, which count how many layers of a kind were created.
    """

    def __init__(self) -> None:
        super().__init__(name="sums")

    def create(self, addends: Sequence[Gradient], op: str, name: str) -> Accumulators:
        """Creates the accumulators for one call of an optimizer.

        Args:
            addends: The tensors to be summed.
            op: "mean" or "sum" over the replicas.
            name: The optimizer's name, for the names of variables.

        Returns:
            One for each of `addends`, and one that counts the steps.
        """
        aggregation = (
            tf.VariableAggregation.MEAN if op == "mean" else tf.VariableAggregation.SUM
        )
        with tf.name_scope(name), tf.name_scope("accumulator"):
            group = self.group(repr((op, *map(facts_of, addends))))
            steps = Accumulator.like(tf.constant(0, tf.int64), group, "steps", None)
            return [
                Accumulator.like(gradient, group, f"sum_{k}", aggregation)
                for k, gradient in enumerate(addends)
            ], steps


def facts_of(gradient: Gradient) -> tuple[Any, ...]:
    """Returns the traits of a gradient that do not depend on the number of replicas."""
    if isinstance(gradient, tf.IndexedSlices):
        rows = gradient.values.shape[1:].as_list()
        return gradient.dtype.name, gradient.indices.dtype.name, rows
    shape = shapes.static(gradient)
    return gradient.dtype.name, None, None if shape is None else list(shape)


@dataclasses.dataclass
class Accumulator:
    """The sum of one variable's gradients over steps, separate on each replica.

    A dense sum is one variable of the gradient's shape; a sparse one keeps all rows:
    values [rows, ...] and indices [rows].
    """

    variables: list[tf.Variable]

    @classmethod
    def like(
        cls, gradient: Gradient, group: tf.Module, name: str, aggregation: Any
    ) -> Accumulator:
        """Creates the accumulator of a gradient, holding zeros or no rows.

        Args:
            gradient: A gradient to be added.
            group: The module where checkpoints find it.
            name: The name within the group.
            aggregation: The tf.VariableAggregation by which checkpoints combine the
                replicas' sums; None for what is equal on all replicas.

        Raises:
            ArgumentError: The shape of a dense gradient is not static.
        """

        def variable(
            suffix: str, shape: Any, dtype: tf.DType, aggregation: Any
        ) -> tf.Variable:
            return _variable(group, f"{name}{suffix}", shape, dtype, aggregation)

        if not isinstance(gradient, tf.IndexedSlices):
            if not gradient.shape.is_fully_defined():
                raise errors.ArgumentError(
                    "an optimizer cannot add up, over several steps, gradients of "
                    f"shape {gradient.shape}, which may change from step to step.",
                    fix="create the variable with a static shape, or use "
                    "accumulation_steps=1.",
                )
            return cls([variable("", gradient.shape, gradient.dtype, aggregation)])
        shape = shapes.with_rows(gradient.values.shape)
        values = variable("_values", shape, gradient.dtype, aggregation)
        indices = variable(
            "_indices", [None], gradient.indices.dtype, tf.VariableAggregation.SUM
        )
        return cls([values, indices])

    def add(self, gradient: Gradient) -> Gradient:
        """Adds a gradient and returns the sum."""
        if isinstance(gradient, tf.IndexedSlices):
            values, indices = self.variables
            return tf.IndexedSlices(
                values.assign(tf.concat([values, gradient.values], 0)).read_value(),
                indices.assign(tf.concat([indices, gradient.indices], 0)).read_value(),
                gradient.dense_shape,
            )
        return self.variables[0].assign_add(gradient).read_value()

    def clear(self) -> list[Any]:
        """Sets the sum to zero and returns the ops to wait for."""
        sparse = len(self.variables) > 1
        return [
            v.assign(
                v.read_value()[:0] if sparse else tf.zeros_like(v), read_value=False
            )
            for v in self.variables
        ]


def _variable(
    group: tf.Module, name: str, shape: Any, dtype: tf.DType, aggregation: Any
) -> tf.Variable:
    """Creates a variable: separate values on the replicas, or equal ones.

    Args:
        group: The module where checkpoints find it; pending values are restored.
        name: The name within the group.
        shape: The shape; it starts with None for rows, of which there are none yet.
        dtype: The dtype.
        aggregation: The tf.VariableAggregation of the components; None: they are equal.
    """
    sizes = tf.TensorShape(shape).as_list()
    rows = bool(sizes) and sizes[0] is None
    options: dict[str, Any] = {}
    if aggregation is not None:
        options["synchronization"] = tf.VariableSynchronization.ON_READ
        options["aggregation"] = tf.VariableAggregation.NONE if rows else aggregation
    initial_shape = [n or 0 for n in sizes]
    with tf.init_scope():
        variable = tf.compat.v1.Variable(
            lambda: tf.zeros(initial_shape, dtype),
            shape=tf.TensorShape(sizes),
            dtype=dtype,
            trainable=False,
            **options,
            name=f"{group.name}/{name}",
            use_resource=True,
        )
        with context.building(None):
            if rows:
                variable.storage.description = Description(Rows(aggregation))
            setattr(group, name, variable)
    return variable


def cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    """Casts a gradient, if it has another dtype."""
    return gradient if gradient.dtype == dtype else tf.cast(gradient, dtype)


def wide(gradient: Gradient) -> Gradient:
    """Casts 16-bit floats to float32, the dtype in which they are summed."""
    is_half = gradient.dtype in (tf.float16, tf.bfloat16)
    return cast(gradient, tf.float32) if is_half else gradient


def dtype_of_weights(gradients: Sequence[Gradient]) -> tf.DType:
    """Returns the dtype in which the weights of gradients are added up."""
    return tf.float64 if any(g.dtype.size > 4 for g in gradients) else tf.float32


def reciprocal(weight: tf.Tensor) -> tf.Tensor:
    """Returns 1 / weight in float64; 0 if that is 0."""
    one = tf.constant(1.0, tf.float64)
    return tf.math.divide_no_nan(one, tf.cast(weight, tf.float64))


def scaled(gradient: Gradient, factor: Any) -> Gradient:
    """Multiplies a gradient; a factor of 0 gives 0 even for NaN and infinity."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            scaled(gradient.values, factor), gradient.indices, gradient.dense_shape
        )
    if isinstance(factor, float):  # tf.cast would round it to float32 first
        factor = tf.constant(factor, gradient.dtype)
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


Accumulators: TypeAlias = tuple[list[Accumulator], Accumulator]
