# SPDX-License-Identifier: Apache-2.0
"""Classifies the results of a function by the examples, and combines the replicas'."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist import joining, kinds, losses
from replicator.autodist.examples import Examples
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value


@dataclasses.dataclass(frozen=True)
class Result:
    """One leaf of what a function returned.

    Attributes:
        value: How it depends on the split of the examples.
        line: The user's line that created it.
        tensor: The leaf of the replica that was traced last.
        cut: How it is recomputed from tensors that can be joined; None if it is not.
    """

    value: Value
    line: str = ""
    tensor: Any = None
    cut: joining.Cut | None = None


def look(leaves: Sequence[Any], own: Examples) -> list[Result]:
    """Returns the Result of each leaf that one replica returns.

    Args:
        leaves: The leaves.
        own: The examples of the replica.
    """
    return [_classify(leaf, own) for leaf in leaves]


def _classify(leaf: Any, replica_examples: Examples) -> Result:
    if not tf.is_symbolic_tensor(leaf):
        return Result(SAME)
    line = errors.line_of(leaf.op)
    if not replica_examples.are_split:
        return Result(UNKNOWN, line)
    values = replica_examples.kinds([leaf])
    value = values.of(leaf)
    if joining.joins(value) or value.kind is Kind.DRAWN:
        return Result(value, line, leaf)
    cut = joining.cut(values, leaf)
    if cut is not None and (value.mixed is None or joining.is_light(cut)):
        return Result(value, line, leaf, cut)
    return Result(value, line, leaf)


def needed(results: Sequence[Result]) -> list[tf.Tensor]:
    """Returns the tensors that replicas return, too, for results to be recomputed."""
    return [leaf for result in results if result.cut for leaf, _ in result.cut.leaves]


def joined(
    results: Sequence[Result],
    returned: Sequence[Any],
    counts: Sequence[tf.Tensor],
    are_split: bool,
) -> list[Any]:
    """Returns the results of the whole batch.

    Args:
        results: The Result of each leaf.
        returned: The values of all replicas, for each leaf and then for each tensor
            that is `needed`.
        counts: Each replica's number of examples.
        are_split: Whether the batch is split; if not, all replicas compute the same.
    """
    needed_values = iter(returned[len(results) :])
    sizes = [tf.cast(count, tf.float32) for count in counts]
    total = tf.add_n(sizes)
    shares = [size / total for size in sizes]
    return [
        _recompute(result, needed_values, shares)
        if result.cut is not None
        else _combine(result, list(values), shares, are_split)
        for result, values in zip(results, returned, strict=False)
    ]


def _recompute(
    result: Result, needed_values: Iterator[Any], shares: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Recomputes a result from joined tensors."""
    assert result.cut is not None, "it is looked at before"
    parts = {leaf.ref(): list(next(needed_values)) for leaf, _ in result.cut.leaves}

    def join(leaf: tf.Tensor, value: Value) -> tf.Tensor:
        return joining.of_parts(value, parts[leaf.ref()], shares)

    return joining.again(result.cut, result.tensor, join)


def _combine(
    result: Result,
    values: list[Any],
    shares: Sequence[tf.Tensor],
    are_split: bool,
) -> Any:
    first = values[0]
    if not isinstance(first, tf.Tensor) or not are_split:
        return first  # each replica has computed the whole batch
    value = result.value
    if value.kind is Kind.DRAWN:
        return first
    if value.mixed is not None and joining.joins(kinds.alone([value])[0]):
        logging.warning("%s", losses.mixes(value.mixed))
        (value,) = kinds.alone([value])
    if kinds.is_same(value):
        return _check_equal(values, result)
    if joining.joins(value):
        return joining.of_parts(value, values, shares)
    inexact = first.dtype.is_floating or first.dtype.is_complex
    if value.mixed is not None and inexact and first.shape.rank == 0:
        _warn_of_mean(first, result)
        return joining.of_parts(losses.MEAN, values, shares)
    raise errors.UnsupportedError(_compose_differs(first, result))


def _check_equal(values: Sequence[tf.Tensor], result: Result) -> tf.Tensor:
    """Returns a value that all replicas share, and asserts that they do."""
    first = values[0]
    text = _compose_differs(first, result)
    checks = [tf.debugging.assert_equal(first, v, text) for v in values[1:]]
    with tf.control_dependencies([c for c in checks if c is not None]):
        return tf.identity(first)


def _compose_differs(first: tf.Tensor, result: Result) -> str:
    return errors.compose(
        f"a function of AutoDist returned {first.dtype.name}{first.shape}, which "
        "differs between replicas, is no mean, sum or extremum over the examples, and "
        "has no row for each.",
        [f"at {result.line}"],
        "return one of these, or a value that is the same on all replicas.",
    )


def _warn_of_mean(tensor: tf.Tensor, result: Result) -> None:
    logging.warning(
        "%s (%s) is neither a mean nor a sum over the examples: a function of AutoDist "
        "returns the mean of the replicas' values, weighted by their numbers of "
        "examples.",
        tensor.name,
        result.line,
    )
