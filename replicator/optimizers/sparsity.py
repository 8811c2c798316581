"""Which gradients are sparse on any replica, and how one becomes as the others are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.optimizers.accumulators import Gradient
from replicator.variables.replicated import plain


@dataclasses.dataclass(frozen=True)
class Layout:
    """Whether a gradient is sparse, and the dtype of its indices if so."""

    index_dtype: str | None = None

    @classmethod
    def of(cls, gradient: Gradient | None) -> Layout | None:
        """Returns the layout of a gradient; None if there is none."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return cls(gradient.indices.dtype.name)
        return cls()


def merge_all(
    ones: Sequence[Layout | None], others: Sequence[Layout | None]
) -> tuple[Layout | None, ...]:
    """Returns the layouts that both of two replicas' gradients can be made."""
    return tuple(_merge(one, two) for one, two in zip(ones, others, strict=True))


def _merge(one: Layout | None, two: Layout | None) -> Layout | None:
    if one is None or two is None:
        return one or two
    return one if one == two else Layout()


def as_layout(
    gradient: Gradient | None, variable: Any, layout: Layout | None
) -> Gradient | None:
    """Makes a gradient dense or sparse; None becomes zeros, unless all have None."""
    if layout is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        if Layout.of(gradient) == layout:
            return gradient
        if gradient.dense_shape is None:
            gradient = tf.IndexedSlices(
                gradient.values, gradient.indices, _shape_of(plain(variable))
            )
    if gradient is not None:
        return tf.convert_to_tensor(gradient)
    value = plain(variable)
    if layout.index_dtype is None:
        return tf.zeros_like(value)
    shape = _shape_of(value)
    return tf.IndexedSlices(
        tf.zeros(tf.concat([[0], shape[1:]], 0), value.dtype),
        tf.zeros([0], layout.index_dtype),
        shape,
    )


def _shape_of(variable: Any) -> tf.Tensor:
    """Returns a variable's shape; it is only read if it may change."""
    if variable.shape.is_fully_defined():
        return tf.constant(variable.shape.as_list(), tf.int32)
    return tf.shape(variable)
