# SPDX-License-Identifier: Apache-2.0
"""What a function returns: what it is over the examples, and how it is put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist.examples import Examples
from replicator.autodist.kinds import UNSAID, Kind
from replicator.graph.ir import shapes


@dataclasses.dataclass(frozen=True)
class Result:
    """One leaf of what a function returned.

    Attributes:
        kind: What it is over the examples.
        line: The user's line that made it.
        over: Of a ratio, what it is divided by.
    """

    kind: Kind
    line: str = ""
    over: tf.Tensor | None = None


def look(leaves: Sequence[Any], own: Examples) -> list[Result]:
    """Returns what the leaves are that one replica returns."""
    return [_look(leaf, own) for leaf in leaves]


def _look(leaf: Any, own: Examples) -> Result:
    if not tf.is_symbolic_tensor(leaf):
        return Result(Kind.SAME)
    line = errors.line_of(leaf.op)
    if not own.are_split:
        return Result(Kind.UNKNOWN, line)
    kinds = own.kinds([leaf])
    kind = kinds.of(leaf)
    if kind is Kind.ROWS and kinds.picks(leaf):
        kind = Kind.UNKNOWN
    return Result(kind, line, kinds.denominator(leaf))


def sums(results: Sequence[Result]) -> list[tf.Tensor]:
    """Returns what ratios are divided by, which a replica returns, too."""
    return [one.over for one in results if one.over is not None]


def joined(
    results: Sequence[Result],
    returned: Sequence[Any],
    counts: Sequence[tf.Tensor],
    are_split: bool,
) -> list[Any]:
    """Returns the results for all examples.

    Args:
        results: What the leaves are.
        returned: The leaves, of all replicas each, and what `sums` returned.
        counts: How many examples each replica has.
        are_split: Whether there are examples; else all replicas do the same.
    """
    further = iter(returned[len(results) :])
    return [
        _joined(
            one,
            list(leaf),
            list(next(further)) if one.over is not None else counts,
            counts,
            are_split,
        )
        for one, leaf in zip(results, returned, strict=False)
    ]


def _joined(
    result: Result,
    values: list[Any],
    weights: Sequence[tf.Tensor],
    counts: Sequence[tf.Tensor],
    are_split: bool,
) -> Any:
    first = values[0]
    if not isinstance(first, tf.Tensor):
        return first
    kind = result.kind if are_split else Kind.UNKNOWN
    if kind is Kind.ROWS:
        return _rows(values, counts)
    if kind in (Kind.SUM, Kind.COUNT):
        own = [
            tf.where(count > 0, value, tf.zeros_like(value))
            for value, count in zip(values, counts, strict=True)
        ]
        return tf.add_n(own) if first.dtype != tf.bool else first
    if kind in (Kind.MAX, Kind.MIN):  # who has no example is lent one of the batch
        join = _extreme(first.dtype, kind)
        return join(tf.stack(values), 0)
    inexact = first.dtype.is_floating or first.dtype.is_complex
    if inexact and (
        kind is Kind.MEAN or kind is Kind.RATIO and result.over is not None
    ):
        return _mean(values, weights, counts)
    if inexact and first.shape.rank == 0 and kind is not Kind.SAME:
        if are_split:
            _warn(first, result)
        return _mean(values, counts, counts)
    return _same(values, result, are_split)


def _rows(values: list[tf.Tensor], counts: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat(
        [
            value[: tf.where(count > 0, tf.shape(value)[0], 0)]
            for value, count in zip(values, counts, strict=True)
        ],
        0,
    )


def _extreme(dtype: tf.DType, kind: Kind) -> Any:
    if dtype == tf.bool:
        return tf.reduce_any if kind is Kind.MAX else tf.reduce_all
    return tf.reduce_max if kind is Kind.MAX else tf.reduce_min


def _mean(
    values: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    counts: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Returns a mean of those that have examples."""
    own = [
        tf.where(count > 0, tf.cast(weight, tf.float64), 0.0)
        for weight, count in zip(weights, counts, strict=True)
    ]
    total = tf.add_n(own)
    parts = [tf.cast(weight / total, values[0].dtype) for weight in own]
    return tf.add_n(
        [
            tf.where(part == 0, tf.zeros_like(value), value * part)
            for value, part in zip(values, parts, strict=True)
        ]
    )


def _same(values: Sequence[tf.Tensor], result: Result, are_split: bool) -> tf.Tensor:
    """Returns what is the same on all replicas, and sees to it that it is."""
    first = values[0]
    unknown = first.shape.rank is None or None in shapes.sizes(first)
    problem = (
        f"A function of AutoDist returned {first.dtype.name}{first.shape}, which "
        "differs between replicas, and is neither a mean, a sum or an extremum of the "
        "examples nor has a row for each."
    )
    sites, fix = [f"at {result.line}"], "return such, or what is the same on all."
    if are_split and unknown and result.kind in UNSAID:
        raise errors.UnsupportedError(errors.compose(problem, sites, fix))
    text = errors.compose(problem, sites, fix)
    checks = [tf.debugging.assert_equal(first, v, text) for v in values[1:]]
    with tf.control_dependencies([c for c in checks if c is not None]):
        return tf.identity(first)


def _warn(tensor: tf.Tensor, result: Result) -> None:
    logging.log_first_n(
        logging.WARNING,
        "%s (%s) is no mean over the examples, nor a sum: what a function of AutoDist "
        "returns of it is the mean of the replicas' own, weighed by their examples.",
        1,
        tensor.name,
        result.line,
    )
