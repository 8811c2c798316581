# SPDX-License-Identifier: Apache-2.0
"""Weighs gradients that pass through communication by replicas' numbers of examples.

A tape differentiates the sum of all replicas' losses. A mean that weighs each replica
by its examples needs the weighted sum instead. For a replica's own loss, that is a
factor of its gradients. Gradients that arrive from other replicas, through the forward
pass's communication, must be weighed by the replica whose loss they are of, not by the
one that receives them. So if a wrapped optimizer takes such a mean, the step is built a
second time: gradients are multiplied by their replica's weight before they are sent and
divided by the receiver's weight when they arrive.

A communication's gradients belong to the optimizer whose applied gradients passed
through them (applied.py). An optimizer that sums, or is given weights, takes them
unweighed; no gradient can be both. Any other gradient is a value like any other, that
of the sum of all replicas' losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.costs import hosts
from replicator.graph.ir import placeholder
from replicator.primitives import applied, unknown_shapes

_WEIGHED = "gradients weighed by whose losses they are of"  # key in Build.knowledge


@dataclasses.dataclass(frozen=True)
class Taken:
    """One time that the gradient of a call was taken.

    Attributes:
        key: The key of the call.
        number: How many times its gradient was taken before.
        calls: The keys of the calls that this gradient made.
        recorded: Whether a tape recorded it.
    """

    key: str
    number: int
    calls: tuple[str, ...]
    recorded: bool


def taken(
    replica: context.ReplicaContext,
    placed: placeholder.Placeholder,
    upstream: Sequence[tf.Tensor],
    take: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor | None]],
) -> list[tf.Tensor | None]:
    """Takes the gradient of a call, weighed if an earlier attempt found that necessary.

    Args:
        replica: The replica that takes it.
        placed: The call.
        upstream: The gradients of its results.
        take: Computes the gradients of its operands from them.
    """
    if replica.examples is None or replica.synchronizes is not None:
        return list(take(upstream))
    key = placed.call.key
    number = replica.count(("gradients taken of", key))
    counter = ("gradient of", key)  # under which base.py counts the calls
    first = replica.counts.get(counter, 0)
    weighed = (key, number) in replica.build.knowledge.get(_WEIGHED, ())
    if weighed:
        weight = _relative_weight(replica)
        upstream = [_times(d, weight) for d in upstream]
    gradients = take(upstream)
    last = replica.counts.get(counter, 0)
    calls = tuple(f"{key}/{k}" for k in range(first, last))
    recorded = _tf.is_recorded([*placed.op.inputs, *placed.op.outputs])
    replica.taken.append(Taken(key, number, calls, recorded))
    if not weighed:
        return list(gradients)
    inverse = tf.math.divide_no_nan(tf.constant(1.0, tf.float64), weight)
    return [None if d is None else _times(d, inverse) for d in gradients]


@dataclasses.dataclass(frozen=True)
class Claim:
    """How an optimizer takes gradients.

    Attributes:
        weighed: Whether gradients from other replicas are weighed by the replicas whose
            losses they are of.
        who: The optimizer and how it combines, for messages.
        line: The user's line.
    """

    weighed: bool
    who: str
    line: str


def claim(
    replica: context.ReplicaContext, gradients: Sequence[Any], weighed: bool, who: str
) -> list[Any]:
    """Has gradients from other replicas weighed, or left as they are, for an optimizer.

    Called where the gradients are about to be combined.

    Args:
        replica: The replica whose gradients they are.
        gradients: The gradients: tensors, IndexedSlices or None.
        weighed: Whether the mean weighs each replica by its examples.
        who: The optimizer that combines them, for messages.

    Returns:
        The gradients, which may wait for a run-time check that weights are not needed.

    Raises:
        ArgumentError: Another optimizer needs the same gradients the other way.
        BuildAgain: They need to be weighed and were not in this attempt.
    """
    if not replica.taken:
        return list(gradients)
    new_claim = Claim(weighed, who, errors.user_line())
    to_weigh, conflict = set(), None
    for entry in _applied(replica, gradients):
        earlier = replica.claims.setdefault((entry.key, entry.number), new_claim)
        if earlier.weighed == weighed:
            to_weigh.add((entry.key, entry.number))
        else:
            conflict = earlier
    if weighed and not to_weigh <= replica.build.knowledge.get(_WEIGHED, frozenset()):
        previous = replica.build.knowledge.get(_WEIGHED, frozenset())
        replica.build.knowledge[_WEIGHED] = previous | to_weigh
        raise context.BuildAgain
    if conflict is None:
        return list(gradients)
    return _if_even(replica, gradients, conflict, new_claim)


def _applied(replica: context.ReplicaContext, gradients: Sequence[Any]) -> list[Taken]:
    """Returns what was taken for these gradients, and not for a loss."""
    reached = applied.reached(gradients, replica.combined)
    entries = [
        entry
        for entry in replica.taken
        if not reached.own.isdisjoint(entry.calls)
        or not (entry.recorded or reached.unless_recorded.isdisjoint(entry.calls))
    ]
    # What they differentiated again is part of the loss: a gradient penalty.
    differentiated = {entry.key for entry in entries}
    return [entry for entry in entries if differentiated.isdisjoint(entry.calls)]


def note_combined(combined: Sequence[Any], op: str, members: Sequence[int]) -> None:
    """Notes what step_fn reduced by itself over the replicas, without weights.

    Sums of gradients are complete: an optimizer's mean of them changes nothing.

    Args:
        combined: The results.
        op: The reduction.
        members: The replicas that took part.
    """
    replica = context.require("a reduction")
    if replica.examples is None or op not in ("sum", "mean"):
        return
    if len(members) == replica.num_replicas:
        tensors = tf.nest.flatten(list(combined), expand_composites=True)
        replica.combined.update((id(x), x) for x in tensors)


def _if_even(
    replica: context.ReplicaContext, gradients: Sequence[Any], first: Claim, own: Claim
) -> list[Any]:
    """Returns gradients that wait for a check that replicas have equally many examples.

    Each replica then weighs 1, so both optimizers can take the same gradients.

    Args:
        replica: The replica whose gradients they are.
        gradients: The gradients.
        first: The claim that came first.
        own: The claim being made.
    """
    problem = (
        f"{own.who}{unknown_shapes.on_replica(replica)} is given gradients that "
        f"{first.who} is also given. They come from other replicas, weighted for one "
        "of the two by each replica's number of examples, and these numbers differ"
    )
    sites = [f"{claimant.who} at {claimant.line}" for claimant in (first, own)]
    fix = (
        "take the gradients of each optimizer with its own call of tape.gradient, "
        "with a tf.GradientTape(persistent=True); or feed batches that divide evenly "
        "among the replicas."
    )
    shard: Any = replica.shard
    sizes = [shard.count, shard.total]
    if None not in map(tf.get_static_value, sizes):  # known statically, and uneven
        raise errors.ArgumentError(errors.compose(f"{problem}.", sites, fix))
    with tf.device(hosts.cpu_of(replica.device)):
        even = tf.equal(shard.count * replica.num_replicas, shard.total)
        message = [f"{problem}.", *sites, "examples of the replica, and of all:"]
        shown = [tf.reshape(size, [1]) for size in sizes]
        asserted = unknown_shapes.fail_unless([even], message, shown, fix)
    with tf.control_dependencies([asserted]):
        return [
            None
            if gradient is None
            else tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
            for gradient in gradients
        ]


def is_known(replica: context.ReplicaContext) -> bool:
    """Whether this build weighs gradients from other replicas."""
    return _WEIGHED in replica.build.knowledge


def _relative_weight(replica: context.ReplicaContext) -> tf.Tensor:
    """Returns a replica's share of the examples, times the number of replicas.

    It is exactly 1, which changes no bits, if all have the same number of examples.
    """
    shard: Any = replica.shard
    count = tf.cast(shard.count, tf.float64) * replica.num_replicas
    return tf.math.divide_no_nan(count, tf.cast(shard.total, tf.float64))


def _times(gradient: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Returns the product; 0 where the factor is 0, whatever the gradient."""
    if not (gradient.dtype.is_floating or gradient.dtype.is_complex):
        return gradient
    factor = tf.cast(factor, gradient.dtype)
    return tf.where(tf.equal(factor, 0), tf.zeros_like(gradient), gradient * factor)
