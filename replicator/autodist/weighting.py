# SPDX-License-Identifier: Apache-2.0
"""Weights the replicas' gradients for their sum, given the weight of the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator.autodist.kinds import Value


@dataclasses.dataclass(frozen=True)
class Weighting:
    """How the gradients of one loss count in the sum over replicas.

    Attributes:
        call: The call that differentiates, kept alive so that its id stays unique.
        loss: The Value of the loss, the sum of all that is differentiated.
        weight: The weight of this replica's loss, a scalar.
        begins: Whether differentiation starts from the weight, so that all gradients
            are weighted already.
        counts: 1 if the weight is positive, else 0; one tensor for the gradients of all
            variables. None if every replica is known to have an example, so that each
            weight is positive.
    """

    call: Any
    loss: Value
    weight: tf.Tensor
    begins: bool
    counts: tf.Tensor | None


def make(
    call: Any, loss: Value, weight: tf.Tensor, begins: bool, all_have_some: bool
) -> Weighting:
    """Returns the Weighting of a loss.

    Args:
        call: As in Weighting.
        loss: As in Weighting.
        weight: As in Weighting.
        begins: As in Weighting.
        all_have_some: Whether every replica is known to have an example.
    """
    counts = None if all_have_some else tf.cast(weight > 0, weight.dtype)
    return Weighting(call, loss, weight, begins, counts)


def guarded(gradient: Any, known: Weighting) -> Any:
    """Returns a gradient without NaN and infinity where its weight is 0.

    Args:
        gradient: The gradient, already weighted; dense or sparse.
        known: The Weighting of its loss.
    """
    if known.loss.over is None:
        return gradient if known.counts is None else scaled(gradient, known.counts)

    def zero_spurious(tensor: tf.Tensor) -> tf.Tensor:
        is_spurious = tf.equal(known.weight, 0) & ~tf.math.is_finite(tensor)
        return tf.where(is_spurious, tf.zeros_like(tensor), tensor)

    return mapped(gradient, zero_spurious)


def scaled(gradient: Any, weight: tf.Tensor) -> Any:
    """Returns a gradient times a weight; it is 0 if the weight is, even for NaN."""

    def multiply(tensor: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))

    return mapped(gradient, multiply)


def mapped(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Applies a function to the numbers of a gradient, dense or sparse."""
    if not isinstance(gradient, tf.IndexedSlices):
        return change(gradient)
    values = change(gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
