"""Which gradients are sparse on any replica, and how one becomes as the others are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.optimizers.accumulators import Gradient
from replicator.variables.replicated import plain


@dataclasses.dataclass(frozen=True)
class Kind:
    """Whether a gradient is sparse, and the dtype of its indices if so."""

    index_dtype: str | None = None

    @classmethod
    def of(cls, gradient: Gradient | None) -> Kind | None:
        """Returns the kind of a gradient; None if there is none."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return cls(gradient.indices.dtype.name)
        return cls()


def merge_all(
    ones: Sequence[Kind | None], others: Sequence[Kind | None]
) -> tuple[Kind | None, ...]:
    """Returns the kinds that both of two replicas' gradients can be made."""
    return tuple(_merge(one, two) for one, two in zip(ones, others, strict=True))


def _merge(one: Kind | None, two: Kind | None) -> Kind | None:
    if one is None or two is None:
        return one or two
    return one if one == two else Kind()


def as_kind(
    gradient: Gradient | None, variable: Any, kind: Kind | None
) -> Gradient | None:
    """Makes a gradient dense or sparse; None becomes zeros, unless all have None."""
    if kind is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        if Kind.of(gradient) == kind:
            return gradient
        if gradient.dense_shape is None:
            gradient = tf.IndexedSlices(
                gradient.values, gradient.indices, _shape_of(plain(variable))
            )
    if gradient is not None:
        return tf.convert_to_tensor(gradient)
    value = plain(variable)
    if kind.index_dtype is None:
        return tf.zeros_like(value)
    shape = _shape_of(value)
    return tf.IndexedSlices(
        tf.zeros(tf.concat([[0], shape[1:]], 0), value.dtype),
        tf.zeros([0], kind.index_dtype),
        shape,
    )


def _shape_of(variable: Any) -> tf.Tensor:
    """Returns a variable's shape; it is only read if it may change."""
    if variable.shape.is_fully_defined():
        return tf.constant(variable.shape.as_list(), tf.int32)
    return tf.shape(variable)
