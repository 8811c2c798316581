# SPDX-License-Identifier: Apache-2.0
"""Weighs gradients that pass through communication by replicas' numbers of examples.

A tape differentiates the sum of all replicas' losses. A mean that weighs each replica
by its examples needs the weighted sum instead. For a replica's own loss, that is a
factor of its gradients. Gradients that arrive from other replicas, through the forward
pass's communication, must be weighed by the replica whose loss they are of, not by the
one that receives them. So if a wrapped optimizer takes such a mean, the step is built a
second time: gradients are multiplied by the sender's weight before they are sent and
divided by the receiver's weight when they arrive.

A communication's gradients belong to the optimizer whose applied gradients passed
through them (applied.py), or to a weighted mean that the step takes by itself
(by_hand.py). An optimizer that sums takes them unweighed; no gradient can be both. Any
other gradient is an ordinary value, of the sum of all replicas' losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import callers, tapes
from replicator.graph.ir import placeholder
from replicator.primitives import applied, evenness
from replicator.primitives.evenness import Usage

_WEIGHED = "gradients weighed by the replicas of their losses"  # in Build.knowledge


@dataclasses.dataclass(frozen=True)
class Record:
    """One computation of the gradient of a call.

    Attributes:
        key: The key of the call.
        number: How many times its gradient was computed before.
        calls: The keys of the calls that this gradient makes.
        recorded: Whether a tape recorded it.
        unclear: A description of the call, if it is in a gradient function of the step
            and nothing tells whether it passes gradients on; else "".
    """

    key: str
    number: int
    calls: tuple[str, ...]
    recorded: bool
    unclear: str = ""


@dataclasses.dataclass
class Weighing:
    """What is known of a replica's gradients where numbers of examples may differ.

    Attributes:
        records: The gradients of its calls that were computed.
        claims: The optimizer that has applied each of these gradients, by the key of
            the call and the number of its gradient.
        combined: The sums over replicas that step_fn computed itself, by their ids.
        weights: The tensors that `weight` has returned, by their ids, and the share
            that each stands for.
    """

    records: list[Record] = dataclasses.field(default_factory=list)
    claims: dict[tuple[str, int], Usage] = dataclasses.field(default_factory=dict)
    combined: dict[int, Any] = dataclasses.field(default_factory=dict)
    weights: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)


def weight(replica: context.ReplicaContext) -> tf.Tensor | None:
    """Returns a replica's weight in means over the replicas; None if all are equal.

    It is the replica's share of the examples of the global batch, a float32 scalar for
    users: what the library computes uses `ReplicaContext.share`. The weights of all
    replicas add up to 1 in every step, so that steps weigh the same.
    """
    share = replica.share
    if share is None:
        return None
    weight, weights = tf.cast(share, tf.float32), replica.states.of(Weighing).weights
    for tensor in (weight, share):  # references keep the ids unique
        weights[id(tensor)] = tensor, share
    return weight


def weighed_gradient(
    replica: context.ReplicaContext,
    placed: placeholder.Placeholder,
    upstream: Sequence[tf.Tensor],
    gradient: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor | None]],
) -> list[tf.Tensor | None]:
    """Computes the gradient of a call, weighed if an earlier build attempt needed that.

    Args:
        replica: The replica that computes it.
        placed: The call.
        upstream: The gradients of its results.
        gradient: Computes the gradients of its operands from them.
    """
    if replica.examples is None:
        return list(gradient(upstream))
    key = placed.call.key
    number = replica.count(("gradients computed of", key))
    counter = ("gradient of", key)  # under which base.py counts the calls
    first = replica.counted(counter)
    weighed = (key, number) in replica.build.knowledge.get(_WEIGHED, ())
    if weighed:
        weight = _relative_weight(replica)
        upstream = [_times(d, weight) for d in upstream]
    gradients = gradient(upstream)
    last = replica.counted(counter)
    calls = tuple(f"{key}/{k}" for k in range(first, last))
    recorded = tapes.is_recorded([*placed.op.inputs, *placed.op.outputs])
    replica.states.of(Weighing).records.append(Record(key, number, calls, recorded))
    if not weighed:
        return list(gradients)
    return [None if d is None else _divided(d, weight) for d in gradients]


_CUSTOM = -1  # the number of a call that is itself part of a custom gradient
# Only one replica's operands count, or there are none on the receiver.
_ONE_SIDED = frozenset(("broadcast", "gather", "recv", "reduce", "scatter", "send"))


def weighed_operands(
    replica: context.ReplicaContext,
    primitive: str,
    key: str,
    operands: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Weighs what a gradient function of the step sends, as of tf.custom_gradient.

    Args:
        replica: The replica that sends.
        primitive: The name of the call's primitive.
        key: The key of the call.
        operands: The operands that the step passes.

    Returns:
        The operands, and the weight by which each was multiplied, if any.
    """
    weights: list[tf.Tensor | None] = [None] * len(operands)
    if (
        replica.examples is None
        or replica.mode.writing is not None  # all replicas must receive the same
        or callers.output_gradients_of_pass() is None
    ):
        return list(operands), weights
    # Under a tape, the function repeats a forward pass.
    unclear = primitive in _ONE_SIDED and not tapes.may_record()
    upstream = [applied.is_upstream(x) for x in operands]
    if not (unclear or any(upstream)):
        return list(operands), weights
    what = f"{primitive} at {errors.user_line()}" if unclear else ""
    recorded = tapes.is_recorded(operands)
    replica.states.of(Weighing).records.append(
        Record(key, _CUSTOM, (key,), recorded, what)
    )
    if not unclear and (key, _CUSTOM) in replica.build.knowledge.get(_WEIGHED, ()):
        weight = _relative_weight(replica)
        weights = [weight if x else None for x in upstream]
    pairs = list(zip(operands, weights, strict=True))
    return [x if weight is None else _times(x, weight) for x, weight in pairs], weights


def unweighed(
    results: list[tf.Tensor], weights: Sequence[tf.Tensor | None]
) -> list[tf.Tensor]:
    """Divides results by the weights of what was sent; see `weighed_operands`.

    Args:
        results: The call's results: one per operand, or else all of one kind.
        weights: The weight of each operand, if any.
    """
    used = [weight for weight in weights if weight is not None]
    if not used:
        return results
    if len(results) != len(weights):
        weights = [used[0]] * len(results)
    return [
        x if weight is None else _divided(x, weight)
        for x, weight in zip(results, weights, strict=True)
    ]


def claim(
    replica: context.ReplicaContext,
    gradients: Sequence[Any],
    weighed: bool,
    who: str,
    sources: Sequence[Any] | None = None,
) -> list[Any]:
    """Has gradients from other replicas weighed, or left as they are, for an optimizer.

    Called where the gradients are about to be combined.

    Args:
        replica: The replica whose gradients they are.
        gradients: The gradients: tensors, IndexedSlices or None.
        weighed: Whether the mean weighs each replica by its examples.
        who: The optimizer that combines them, for messages.
        sources: The gradients to weigh, if `gradients` are computed from others.

    Returns:
        The gradients, which may wait for a run-time check that weights are not needed.

    Raises:
        ArgumentError: Another optimizer needs the same gradients the other way.
        BuildAgain: They need to be weighed and were not in this attempt.
    """
    state = replica.states.of(Weighing)
    if not state.records:
        return list(gradients)
    new_claim = Usage(weighed, who, errors.user_line())
    to_weigh, conflict = set(), None
    entries, kept = _applied(replica, gradients if sources is None else sources)
    for entry in entries:
        existing = state.claims.setdefault((entry.key, entry.number), new_claim)
        if existing.weighed == weighed:
            to_weigh.add((entry.key, entry.number))
        else:
            conflict = existing
    weighed_before = replica.build.knowledge.get(_WEIGHED, frozenset())
    if weighed and not to_weigh <= weighed_before:
        replica.build.knowledge[_WEIGHED] = weighed_before | to_weigh
        raise context.BuildAgain
    unclear = [entry.unclear for entry in entries if entry.unclear]
    problems = []
    if weighed and unclear:
        problems.append(evenness.about_unclear(unclear, new_claim))
    if weighed and kept:
        problems.append(evenness.about_kept(kept[0], new_claim))
    if conflict is not None:
        problems.append(evenness.about_both(conflict, new_claim))
    for problem in problems:
        gradients = evenness.if_even(replica, gradients, *problem)
    return list(gradients)


def communicated(replica: context.ReplicaContext, gradients: Sequence[Any]) -> bool:
    """Whether gradients passed through communication."""
    return bool(replica.states.of(Weighing).records and _applied(replica, gradients)[0])


def _applied(
    replica: context.ReplicaContext, gradients: Sequence[Any]
) -> tuple[list[Record], list[Any]]:
    """Returns the computations that contributed to gradients, and not to a loss.

    Also the variables of each replica's own that they are read from: what was written
    there, and in which step, is not known.
    """
    state = replica.states.of(Weighing)
    passed = applied.passed_calls(gradients, state.combined)
    entries = [
        entry
        for entry in state.records
        if not passed.certain.isdisjoint(entry.calls)
        or not (entry.recorded or passed.unless_recorded.isdisjoint(entry.calls))
    ]
    # A call that was differentiated again is part of the loss: a gradient penalty.
    differentiated = {entry.key for entry in entries if entry.number != _CUSTOM}
    entries = [entry for entry in entries if differentiated.isdisjoint(entry.calls)]
    read = map(replica.build.aliases.variable, passed.read)
    return entries, [v for v in read if v is not None and v.placement.differs]


def note_combined(combined: Sequence[Any], op: str, members: Sequence[int]) -> None:
    """Records what step_fn itself reduced over the replicas, without weights.

    Such gradients are complete: an optimizer's mean of them changes nothing.

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
        replica.states.of(Weighing).combined.update((id(x), x) for x in tensors)


def _relative_weight(replica: context.ReplicaContext) -> tf.Tensor:
    """Returns a replica's share of the examples, times the number of replicas.

    It is exactly 1, which changes no bits, if all have the same number of examples.
    """
    shard: Any = replica.shard
    count = tf.cast(shard.count, tf.float64) * replica.num_replicas
    return tf.math.divide_no_nan(count, tf.cast(shard.total, tf.float64))


def _divided(gradient: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns the quotient; 0 where the weight is 0."""
    one = tf.constant(1.0, tf.float64)
    return _times(gradient, tf.math.divide_no_nan(one, weight))


def _times(gradient: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Returns the product; 0 where the factor is 0, whatever the gradient."""
    if not (gradient.dtype.is_floating or gradient.dtype.is_complex):
        return gradient
    factor = tf.cast(factor, gradient.dtype)
    return tf.where(tf.equal(factor, 0), tf.zeros_like(gradient), gradient * factor)
