"""Where the gradient of each reduction goes: what each operand gets of it.

Functions of the operands of a replica, the results, the gradients of the sum of all
losses by each result, and the call that is differentiated; they return one gradient per
operand. Every replica that takes part calls them: some communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator.graph.ir.placeholder import Call, Value
from replicator.primitives import all_gather, arithmetic, base

Share = Callable[
    [Sequence[tf.Tensor], Sequence[tf.Tensor], Sequence[tf.Tensor], Call],
    list[tf.Tensor],
]


def to_all(
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    totals: Sequence[tf.Tensor],
    of: Call,
) -> list[tf.Tensor]:
    """All of it to each replica."""
    return list(totals)


def in_equal_parts(
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    totals: Sequence[tf.Tensor],
    of: Call,
) -> list[tf.Tensor]:
    """The same part of it to each replica."""
    return [arithmetic.divide(total, len(of.group)) for total in totals]


def to_holders(
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    totals: Sequence[tf.Tensor],
    of: Call,
) -> list[tf.Tensor]:
    """To the replicas that hold the extremum; where several do, in equal shares."""
    held = [
        tf.cast(tf.equal(x, y), x.dtype) for x, y in zip(operands, results, strict=True)
    ]
    holders = base.communicate(
        "all_reduce",
        base.all_reduce_options("sum", of=of),
        held,
        [Value.of(x) for x in held],
        of=of,
    )
    return [
        mine * tf.math.divide_no_nan(total, tf.stop_gradient(count))
        for mine, total, count in zip(held, totals, holders, strict=True)
    ]


def times_others(
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    totals: Sequence[tf.Tensor],
    of: Call,
) -> list[tf.Tensor]:
    """Times the product of the other replicas' values.

    Multiplied out rather than divided by the own value, which may be zero.
    """
    everyone = all_gather.gather_dense(operands, None, of=of)
    count = len(of.group)
    own = tf.one_hot(of.group.index(of.replica_id), count, True, False)
    back = []
    for total, values in zip(totals, everyone, strict=True):
        rank = tf.concat([[count], tf.ones([tf.rank(total)], tf.int32)], 0)
        others = tf.where(tf.reshape(own, rank), tf.ones_like(values), values)
        back.append(total * tf.math.conj(tf.reduce_prod(others, axis=0)))
    return back


def to_owner(
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    totals: Sequence[tf.Tensor],
    of: Call,
) -> list[tf.Tensor]:
    """All of it to the owner."""
    owners = results[len(results) // 2 :]
    return [
        tf.where(tf.equal(owner, of.replica_id), total, tf.zeros_like(total))
        for owner, total in zip(owners, totals, strict=True)
    ]
