# SPDX-License-Identifier: Apache-2.0
"""Through which tensors of a call gradients flow, for the primitives' gradients."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether gradients flow through tensors of this dtype."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def places(tensors: Sequence[tf.Tensor]) -> list[int]:
    """Returns at which places there are tensors through which gradients flow."""
    return [k for k, tensor in enumerate(tensors) if is_differentiable(tensor)]


def spread(
    gradients: Sequence[tf.Tensor], at: Sequence[int], count: int
) -> list[tf.Tensor | None]:
    """Returns gradients in a list with None at all other places.

    Args:
        gradients: The gradients.
        at: Their places.
        count: How many places there are.
    """
    found = dict(zip(at, gradients, strict=True))
    return [found.get(k) for k in range(count)]
