# SPDX-License-Identifier: Apache-2.0
"""Selects the tensors of a call through which gradients flow, for its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether gradients flow through tensors of this dtype."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def places(tensors: Sequence[tf.Tensor]) -> list[int]:
    """Returns the indices of the tensors through which gradients flow."""
    return [k for k, tensor in enumerate(tensors) if is_differentiable(tensor)]


def spread(
    gradients: Sequence[tf.Tensor], at: Sequence[int], count: int
) -> list[tf.Tensor | None]:
    """Returns `count` gradients: these at their indices, None elsewhere.

    Args:
        gradients: The gradients.
        at: The index of each.
        count: The length of the list.
    """
    gradient_at = dict(zip(at, gradients, strict=True))
    return [gradient_at.get(k) for k in range(count)]


class Receipts(list[Any]):
    """For `Replicator.linked`: a scalar zero for each call that returned nothing."""


def last_receipt(what: str) -> tf.Tensor:
    """Returns the receipt of the call that the replica has just made."""
    receipt: tf.Tensor = context.require(what).states.of(Receipts)[-1]
    return receipt
