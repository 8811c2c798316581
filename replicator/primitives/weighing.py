# SPDX-License-Identifier: Apache-2.0
"""Gradients through communication, where replicas weigh as many examples as they have.

What is differentiated is the sum of all replicas' losses. A mean of gradients that
weighs each replica by its examples wants the weighted sum instead, which on one replica
alone is a factor of its gradients. Not so where gradients come from other replicas,
through what the forward pass communicated: they have to be weighed by whose losses they
are of, and not by who receives them. So where a wrapped optimizer is to take such a
mean, the step is built once more, and gradients are multiplied by their replica's
weight before they are sent, and divided by the receiver's when they have arrived.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context

_WEIGHED = "gradients weighed by whose losses they are of"  # knowledge of a build


@dataclasses.dataclass(frozen=True)
class Taken:
    """A gradient of a call that was taken.

    Attributes:
        key: The call's.
        number: Which gradient of the call it is, from 0 on.
        calls: The keys of the calls that it made.
    """

    key: str
    number: int
    calls: tuple[str, ...]


def taken(
    replica: context.ReplicaContext,
    key: str,
    upstream: Sequence[tf.Tensor],
    take: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor | None]],
) -> list[tf.Tensor | None]:
    """Takes the gradient of a call, weighed where that is known to be needed.

    Args:
        replica: Whose it is.
        key: The call's.
        upstream: The gradients of its results.
        take: Returns those of its operands.
    """
    if replica.examples is None or replica.synchronizes is not None:
        return list(take(upstream))
    number = replica.count(("gradients taken of", key))
    place = ("gradient of", key)  # as base.py counts calls
    first = replica.counts.get(place, 0)
    weighed = (key, number) in replica.build.knowledge.get(_WEIGHED, ())
    if weighed:
        weight = _relative_weight(replica)
        upstream = [_times(d, weight) for d in upstream]
    made = take(upstream)
    last = replica.counts.get(place, 0)
    calls = tuple(f"{key}/{k}" for k in range(first, last))
    replica.taken.append(Taken(key, number, calls))
    if not weighed:
        return list(made)
    inverse = tf.math.divide_no_nan(tf.constant(1.0, tf.float64), weight)
    return [None if d is None else _times(d, inverse) for d in made]


def ask(replica: context.ReplicaContext) -> None:
    """Has the gradients that came from other replicas so far weighed by whose they are.

    Called where they are to be combined, each replica's weighed by its examples.

    Raises:
        BuildAgain: They were not.
    """
    # What was differentiated again is part of a loss, as a gradient penalty is.
    again = {one.key for one in replica.taken}
    wanted = {
        (one.key, one.number) for one in replica.taken if again.isdisjoint(one.calls)
    }
    known = replica.build.knowledge.get(_WEIGHED, frozenset())
    if not wanted <= known:
        replica.build.knowledge[_WEIGHED] = known | wanted
        raise context.BuildAgain


def is_known(replica: context.ReplicaContext) -> bool:
    """Whether gradients from other replicas are weighed in this build."""
    return _WEIGHED in replica.build.knowledge


def _relative_weight(replica: context.ReplicaContext) -> tf.Tensor:
    """Returns a replica's share of the examples, times the number of replicas.

    That is exactly 1, which changes no bits, where all have as many.
    """
    shard: Any = replica.shard
    count = tf.cast(shard.count, tf.float64) * replica.num_replicas
    return tf.math.divide_no_nan(count, tf.cast(shard.total, tf.float64))


def _times(gradient: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Returns a product, which is 0 where the factor is, whatever the gradient is."""
    if not (gradient.dtype.is_floating or gradient.dtype.is_complex):
        return gradient
    factor = tf.cast(factor, gradient.dtype)
    return tf.where(tf.equal(factor, 0), tf.zeros_like(gradient), gradient * factor)
