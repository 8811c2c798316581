# SPDX-License-Identifier: Apache-2.0
"""Gradients through communication, where replicas weigh as many examples as they have.

What is differentiated is the sum of all replicas' losses. A mean of gradients that
weighs each replica by its examples wants the weighted sum instead, which on one replica
alone is a factor of its gradients. Not so where gradients come from other replicas,
through what the forward pass communicated: they have to be weighed by whose losses they
are of, and not by who receives them. So where a wrapped optimizer is to take such a
mean, the step is built once more, and gradients are multiplied by their replica's
weight before they are sent, and divided by the receiver's when they have arrived.

Which gradients are an optimizer's is what those that it applies are computed from. One
that adds up, or is given weights, takes them as they are; no gradient can be both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.costs import hosts
from replicator.graph.ir import placeholder
from replicator.graph.matching import control_flow
from replicator.primitives import unknown_shapes

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


@dataclasses.dataclass(frozen=True)
class Claim:
    """What an optimizer takes gradients for.

    Attributes:
        weighed: Whether those from other replicas are to be weighed by whose they are.
        who: The optimizer, and how it takes them, for messages.
        line: The user's line.
    """

    weighed: bool
    who: str
    line: str


def claim(
    replica: context.ReplicaContext, gradients: Sequence[Any], weighed: bool, who: str
) -> list[Any]:
    """Has the gradients from other replicas weighed, or left as they are.

    Called where they are to be combined.

    Args:
        replica: Whose they are.
        gradients: What is to be combined: tensors, IndexedSlices or None.
        weighed: Whether the mean weighs each replica by its examples.
        who: Who combines them, for messages.

    Returns:
        The gradients, which may wait until it is known that nothing has to be weighed.

    Raises:
        ArgumentError: Another optimizer wants the same ones otherwise.
        BuildAgain: They were not weighed.
    """
    if not replica.taken:
        return list(gradients)
    # What was differentiated again is part of a loss, as a gradient penalty is.
    again = {one.key for one in replica.taken}
    reached = _reached(gradients)
    own = Claim(weighed, who, errors.user_line())
    wanted, other = set(), None
    for one in replica.taken:
        if again.isdisjoint(one.calls) and not reached.isdisjoint(one.calls):
            known = replica.claims.setdefault((one.key, one.number), own)
            if known.weighed == weighed:
                wanted.add((one.key, one.number))
            else:
                other = known
    if weighed and not wanted <= replica.build.knowledge.get(_WEIGHED, frozenset()):
        before = replica.build.knowledge.get(_WEIGHED, frozenset())
        replica.build.knowledge[_WEIGHED] = before | wanted
        raise context.BuildAgain
    if other is None:
        return list(gradients)
    return _if_even(replica, gradients, other, own)


def _reached(gradients: Sequence[Any]) -> set[str]:
    """Returns the keys of all calls that some gradients are computed from."""
    keys: set[str] = set()
    tensors = tf.nest.flatten(list(gradients), expand_composites=True)
    left = [x for x in tensors if tf.is_symbolic_tensor(x)]
    seen = {id(x): x for x in left}
    captured: dict[tf.Graph, dict[int, tf.Tensor]] = {}
    while left:
        tensor = left.pop()
        op, graph = tensor.op, tensor.graph
        call = placeholder.read(op)
        found = control_flow.calls_inside(op) if call is None else (call,)
        keys.update(one.key for one in found)
        before = list(op.inputs)
        if op.type == "Placeholder" and graph.building_function:
            if graph not in captured:
                captured[graph] = {id(x): outer for outer, x in graph.captures}
            outer = captured[graph].get(id(tensor))
            before = [] if outer is None else [outer]
        new = [x for x in before if tf.is_symbolic_tensor(x) and id(x) not in seen]
        seen.update((id(x), x) for x in new)
        left += new
    return keys


def _if_even(
    replica: context.ReplicaContext, gradients: Sequence[Any], first: Claim, own: Claim
) -> list[Any]:
    """Returns gradients that wait until replicas are found to have as many examples.

    Then each weighs 1, and nothing has to be weighed.

    Args:
        replica: Whose they are.
        gradients: The gradients.
        first: Who took them before.
        own: Who takes them now.
    """
    problem = (
        f"{own.who} on replica {replica.replica_id} is given gradients that also "
        f"{first.who} is given. They come from other replicas, weighed for one of the "
        "two by the examples that each replica has, and these differ"
    )
    sites = [f"{one.who} at {one.line}" for one in (first, own)]
    fix = (
        "take the gradients of each optimizer by a call of tape.gradient of its own, "
        "with a tf.GradientTape(persistent=True); or feed batches that the replicas "
        "divide evenly."
    )
    shard: Any = replica.shard
    sizes = [shard.count, shard.total]
    if None not in map(tf.get_static_value, sizes):  # known, and not to be even
        raise errors.ArgumentError(errors.compose(f"{problem}.", sites, fix))
    with tf.device(hosts.cpu_of(replica.device)):
        even = tf.equal(shard.count * replica.num_replicas, shard.total)
        said = [f"{problem}.", *sites, "examples of the replica, and of all:"]
        seen = [tf.reshape(size, [1]) for size in sizes]
        asserted = unknown_shapes.fail_unless([even], said, seen, fix)
    with tf.control_dependencies([asserted]):
        return [
            None
            if gradient is None
            else tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
            for gradient in gradients
        ]


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
