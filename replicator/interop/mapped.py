# SPDX-License-Identifier: Apache-2.0
"""Checks and aligns what map_reduce's function returns for the entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.primitives import base, unknown_shapes


def check_equal_specs(
    results: Sequence[Any], flat: Sequence[Sequence[tf.Tensor]]
) -> None:
    """Raises ArgumentError if results of map_reduce's function differ in structure."""
    for result, leaves in zip(results, flat, strict=True):
        are_equal = len(leaves) == len(flat[0]) and all(
            spec.dtype == leaf.dtype and spec.shape.is_compatible_with(leaf.shape)
            for spec, leaf in zip(flat[0], leaves, strict=True)
        )
        if not are_equal:
            raise base.bad_argument(
                "map_reduce",
                f"was given a function that returns {errors.repr_of(results[0])} "
                "for one "
                f"entry and {errors.repr_of(result)} for another",
                "return tensors of one dtype and shape for all entries.",
            )


def of_one_shape(column: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Returns the results, after comparing those shapes that are unknown so far."""
    if len(column) == 1 or all(map(unknown_shapes.is_known, column)):
        return column
    return unknown_shapes.check_local(
        "map_reduce",
        column,
        unknown_shapes.equal,
        "the results of the function differ in shape",
        "shapes for the entries of this replica",
        "return tensors of one shape for all entries.",
    )


def neutral(result: tf.Tensor, op: str) -> tf.Tensor:
    """Returns the reduction's neutral element, in the shape of a result.

    It depends on the result, so that tapes find the communication on each replica.
    """
    dtype = result.dtype
    if dtype.is_bool:
        number = tf.constant(op == "min")
    elif op in ("min", "max"):
        limits = {"min": dtype.max, "max": dtype.min}
        infinities = {"min": float("inf"), "max": -float("inf")}
        number = tf.constant((infinities if dtype.is_floating else limits)[op], dtype)
    else:
        number = tf.constant(1 if op == "prod" else 0, dtype)
    return tf.where(False, result, number)
