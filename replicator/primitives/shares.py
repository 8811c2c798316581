# SPDX-License-Identifier: Apache-2.0
"""Where the gradient of each reduction goes: what each operand gets of it.

Functions of what was reduced, which return one gradient per operand. Every replica that
takes part calls them: some communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from replicator.graph.ir.placeholder import Call, Value
from replicator.primitives import all_gather, arithmetic, base


class Reduced(NamedTuple):
    """A reduction that is differentiated, on one replica that takes part.

    Attributes:
        operands: What the replica passed: floating or complex tensors.
        results: What came of it.
        totals: The gradient of the sum of all losses by each result.
        of: The call.
    """

    operands: Sequence[tf.Tensor]
    results: Sequence[tf.Tensor]
    totals: Sequence[tf.Tensor]
    of: Call


Share = Callable[[Reduced], list[tf.Tensor]]


def to_all(done: Reduced) -> list[tf.Tensor]:
    """All of it to each replica."""
    return list(done.totals)


def in_equal_parts(done: Reduced) -> list[tf.Tensor]:
    """The same part of it to each replica."""
    return [arithmetic.divide(total, len(done.of.group)) for total in done.totals]


def to_holders(done: Reduced) -> list[tf.Tensor]:
    """To the replicas that hold the extremum; where several do, in equal shares."""
    held = [
        tf.cast(tf.equal(x, y), x.dtype)
        for x, y in zip(done.operands, done.results, strict=True)
    ]
    holders = base.communicate(
        "all_reduce",
        base.all_reduce_options("sum", of=done.of),
        held,
        [Value.of(x) for x in held],
        of=done.of,
    )
    return [
        mine * tf.math.divide_no_nan(total, tf.stop_gradient(count))
        for mine, total, count in zip(held, done.totals, holders, strict=True)
    ]


def times_others(done: Reduced) -> list[tf.Tensor]:
    """Times the product of the other replicas' values.

    Multiplied out rather than divided by the own value, which may be zero.
    """
    everyone = all_gather.gather_dense(done.operands, None, of=done.of)
    count = len(done.of.group)
    own = tf.one_hot(done.of.group.index(done.of.replica_id), count, True, False)
    back = []
    for total, values in zip(done.totals, everyone, strict=True):
        rank = tf.concat([[count], tf.ones([tf.rank(total)], tf.int32)], 0)
        others = tf.where(tf.reshape(own, rank), tf.ones_like(values), values)
        back.append(total * tf.math.conj(tf.reduce_prod(others, axis=0)))
    return back


def to_owner(done: Reduced) -> list[tf.Tensor]:
    """All of it to the owner."""
    owners = done.results[len(done.results) // 2 :]
    return [
        tf.where(tf.equal(owner, done.of.replica_id), total, tf.zeros_like(total))
        for owner, total in zip(owners, done.totals, strict=True)
    ]
