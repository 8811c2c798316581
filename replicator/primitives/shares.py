# SPDX-License-Identifier: Apache-2.0
"""The gradient of each reduction: the share of it that each operand gets.

Each function takes a differentiated reduction and returns one gradient per operand.
Every participating replica must call it, since some communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from replicator.graph.ir.placeholder import Call, Value
from replicator.primitives import all_gather, arithmetic, base


class Reduced(NamedTuple):
    """A reduction being differentiated, on one of the participating replicas.

    Attributes:
        operands: The replica's floating or complex operands.
        results: Its results.
        totals: The gradient of the sum of all losses by each result.
        of: The call.
    """

    operands: Sequence[tf.Tensor]
    results: Sequence[tf.Tensor]
    totals: Sequence[tf.Tensor]
    of: Call


Share = Callable[[Reduced], list[tf.Tensor]]


def to_all(reduced: Reduced) -> list[tf.Tensor]:
    """Gives each replica all of the gradient."""
    return list(reduced.totals)


def in_equal_parts(reduced: Reduced) -> list[tf.Tensor]:
    """Gives each replica an equal part of the gradient."""
    return [arithmetic.divide(total, len(reduced.of.group)) for total in reduced.totals]


def to_holders(reduced: Reduced) -> list[tf.Tensor]:
    """Splits the gradient equally among the replicas that hold the extremum.

    The others get zeros, even where the gradient is infinite or NaN.
    """
    masks = [
        arithmetic.holds(x, y)
        for x, y in zip(reduced.operands, reduced.results, strict=True)
    ]
    indicators = [
        tf.cast(mask, x.dtype) for mask, x in zip(masks, reduced.operands, strict=True)
    ]
    holders = base.communicate(
        "all_reduce",
        base.all_reduce_options("sum", of=reduced.of),
        indicators,
        [Value.of(x) for x in indicators],
        of=reduced.of,
    )
    return [
        tf.where(mask, total / tf.maximum(tf.stop_gradient(count), 1), 0)
        for mask, total, count in zip(masks, reduced.totals, holders, strict=True)
    ]


def times_others(reduced: Reduced) -> list[tf.Tensor]:
    """Multiplies the gradient by the product of the other replicas' values.

    Dividing the result by the replica's own value would fail where that is zero.
    """
    gathered = all_gather.gather_dense(reduced.operands, None, of=reduced.of)
    count = len(reduced.of.group)
    group = reduced.of.group
    own_index = base.differing(lambda r: group.index(r) if r in group else -1)
    is_own = tf.one_hot(own_index, count, True, False)
    gradients = []
    for total, values in zip(reduced.totals, gathered, strict=True):
        rank = tf.concat([[count], tf.ones([tf.rank(total)], tf.int32)], 0)
        others = tf.where(tf.reshape(is_own, rank), tf.ones_like(values), values)
        gradients.append(total * tf.math.conj(tf.reduce_prod(others, axis=0)))
    return gradients


def to_owner(reduced: Reduced) -> list[tf.Tensor]:
    """Gives the owner all of the gradient."""
    owners = reduced.results[len(reduced.results) // 2 :]
    own_id = base.differing(int)
    return [
        tf.where(tf.equal(owner, own_id), total, tf.zeros_like(total))
        for owner, total in zip(owners, reduced.totals, strict=True)
    ]
