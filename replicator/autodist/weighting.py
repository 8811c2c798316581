# SPDX-License-Identifier: Apache-2.0
"""Gradients as they count in the sum of all replicas', once a weight is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator.autodist.kinds import Value


@dataclasses.dataclass(frozen=True)
class Weighting:
    """What is differentiated, and how its gradients count in the sum of all replicas'.

    Attributes:
        call: The call that differentiates; its id is taken while it lives.
        loss: What is differentiated.
        weight: What that weighs.
        begins: Whether differentiation starts from the weight.
        counts: One where the weight is positive, else zero; one tensor for the
            gradients of all variables. None: every replica has an example, so that the
            weight is positive on each.
    """

    call: Any
    loss: Value
    weight: tf.Tensor
    begins: bool
    counts: tf.Tensor | None


def make(
    call: Any, loss: Value, weight: tf.Tensor, begins: bool, all_have_some: bool
) -> Weighting:
    """Returns a Weighting of these.

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
    """Returns a gradient, without what is no number where it counts for nothing.

    Args:
        gradient: Is weighed already, dense or sparse.
        known: What it is of.
    """
    if known.loss.over is None:
        return gradient if known.counts is None else scaled(gradient, known.counts)

    def keep(one: tf.Tensor) -> tf.Tensor:
        spoilt = tf.equal(known.weight, 0) & ~tf.math.is_finite(one)
        return tf.where(spoilt, tf.zeros_like(one), one)

    return mapped(gradient, keep)


def scaled(gradient: Any, weight: tf.Tensor) -> Any:
    """Returns a gradient times a number, 0 where that is, whatever the gradient is."""

    def product(one: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(one, tf.cast(weight, one.dtype))

    return mapped(gradient, product)


def mapped(gradient: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Returns a gradient whose numbers are changed, dense or sparse."""
    if not isinstance(gradient, tf.IndexedSlices):
        return change(gradient)
    values = change(gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
