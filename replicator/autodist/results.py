# SPDX-License-Identifier: Apache-2.0
"""What a function returns: what it is over the examples, and how it is put together."""

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
        value: What it is over the examples.
        line: The user's line that made it.
        tensor: What it was on the replica that was traced last.
        cut: How it is computed once more of what can be put together, if it is.
    """

    value: Value
    line: str = ""
    tensor: Any = None
    cut: joining.Cut | None = None


def look(leaves: Sequence[Any], own: Examples) -> list[Result]:
    """Returns what the leaves are that one replica returns."""
    return [_look(leaf, own) for leaf in leaves]


def _look(leaf: Any, own: Examples) -> Result:
    if not tf.is_symbolic_tensor(leaf):
        return Result(SAME)
    line = errors.line_of(leaf.op)
    if not own.are_split:
        return Result(UNKNOWN, line)
    known = own.kinds([leaf])
    value = known.of(leaf)
    if joining.joins(value) or value.kind is Kind.DRAWN:
        return Result(value, line, leaf)
    cut = joining.cut(known, leaf)
    if cut is not None and (value.mixed is None or joining.is_light(cut)):
        return Result(value, line, leaf, cut)
    return Result(value, line, leaf)


def needed(results: Sequence[Result]) -> list[tf.Tensor]:
    """Returns what has to be put together besides the results themselves."""
    return [leaf for one in results if one.cut for leaf, _ in one.cut.leaves]


def joined(
    results: Sequence[Result],
    returned: Sequence[Any],
    counts: Sequence[tf.Tensor],
    are_split: bool,
) -> list[Any]:
    """Returns the results for all examples.

    Args:
        results: What the leaves are.
        returned: The leaves, of all replicas each, and what is `needed` besides.
        counts: How many examples each replica has.
        are_split: Whether there are; else all replicas do the same.
    """
    further = iter(returned[len(results) :])
    own = [tf.cast(count, tf.float32) for count in counts]
    total = tf.add_n(own)
    shares = [count / total for count in own]
    return [
        _again(one, further, shares)
        if one.cut is not None
        else _joined(one, list(leaf), shares, are_split)
        for one, leaf in zip(results, returned, strict=False)
    ]


def _again(
    result: Result, further: Iterator[Any], shares: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Returns a result that is computed once more."""
    assert result.cut is not None, "it is looked at before"
    parts = {leaf.ref(): list(next(further)) for leaf, _ in result.cut.leaves}

    def join(leaf: tf.Tensor, value: Value) -> tf.Tensor:
        return joining.of_parts(value, parts[leaf.ref()], shares)

    return joining.again(result.cut, result.tensor, join)


def _joined(
    result: Result,
    values: list[Any],
    shares: Sequence[tf.Tensor],
    are_split: bool,
) -> Any:
    first = values[0]
    if not isinstance(first, tf.Tensor) or not are_split:
        return first  # each has computed all of it
    value = result.value
    if value.kind is Kind.DRAWN:
        return first
    if value.mixed is not None and joining.joins(kinds.alone([value])[0]):
        logging.warning("%s", losses.mixes(value.mixed))
        (value,) = kinds.alone([value])
    if kinds.is_same(value):
        return _same(values, result)
    if joining.joins(value):
        return joining.of_parts(value, values, shares)
    inexact = first.dtype.is_floating or first.dtype.is_complex
    if value.mixed is not None and inexact and first.shape.rank == 0:
        _warn(first, result)
        return joining.of_parts(losses.MEAN, values, shares)
    raise errors.UnsupportedError(_compose_differs(first, result))


def _same(values: Sequence[tf.Tensor], result: Result) -> tf.Tensor:
    """Returns what is the same on all replicas, and sees to it that it is."""
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


def _warn(tensor: tf.Tensor, result: Result) -> None:
    logging.warning(
        "%s (%s) is neither a mean nor a sum over the examples: a function of AutoDist "
        "returns the mean of the replicas' values, weighted by their numbers of "
        "examples.",
        tensor.name,
        result.line,
    )
