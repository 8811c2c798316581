# SPDX-License-Identifier: Apache-2.0
"""Weighted means of gradients that a step takes by itself, without a wrapped optimizer.

Gradients that passed through communication are those of the sum of all replicas'
losses. If their mean is weighted by `repl.weight`, as in a wrapped optimizer, each is
weighed by the replica of its loss (weighing.py), so that the mean equals the gradient
on one device. Other weights may be computed after the gradients, too late to weigh
them: those must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import callers
from replicator.costs import hosts
from replicator.primitives import (
    applied,
    base,
    evenness,
    reductions,
    unknown_shapes,
    weighing,
)

_FIX = (
    "pass weight=repl.weight, if these are the replicas' shares of the examples; or "
    "multiply each replica's loss by its weight, and sum the gradients over the "
    "replicas."
)
_SHARE_PRESERVING = ("Cast", "Identity", "Reshape", "Squeeze", "Mul")


def of_mean(
    leaves: Sequence[Any], weight: tf.Tensor, members: Sequence[int]
) -> tuple[list[Any], bool]:
    """Has the gradients in a weighted mean weighed by the replicas of their losses.

    Args:
        leaves: What the step averages: tensors and IndexedSlices.
        weight: This replica's weight, a float64 scalar.
        members: The replicas that take part.

    Returns:
        The leaves, which may wait for a run-time check that no weights are needed; and
        whether their mean equals the gradient on one device, so that an optimizer has
        nothing left to weigh.

    Raises:
        ArgumentError: An optimizer needs the same gradients unweighed.
        BuildAgain: They need to be weighed and were not in this attempt.
    """
    replica = context.require("all_reduce")
    state = replica.states.of(weighing.Weighing)
    if not state.records or replica.mode.writing is not None:
        return list(leaves), False
    if callers.output_gradients_of_pass() is not None:
        return list(leaves), False
    count = tf.get_static_value(replica.shard.count)
    gradients = applied.gradients_in(leaves, state.combined, count)
    if gradients and is_by_examples(replica, weight):
        who = 'all_reduce ("mean")'
        return weighing.claim(replica, leaves, True, who, gradients), True
    if weighing.communicated(replica, gradients):
        return if_equal(replica, leaves, weight, members, "all_reduce"), False
    return list(leaves), False


def is_by_examples(replica: context.ReplicaContext, weight: Any) -> bool:
    """Whether a weight is `repl.weight`, possibly cast or multiplied by a constant."""
    return _share_of(replica, weight, _SHARE_PRESERVING) is not None


def exact(replica: context.ReplicaContext, weight: Any) -> Any:
    """Returns the float64 share for `repl.weight`, possibly cast; else the weight.

    What users get is a float32, which would round means of float64 values.
    """
    share = _share_of(replica, weight, ("Cast", "Identity"))
    return weight if share is None else share


def _share_of(
    replica: context.ReplicaContext, weight: Any, passing: Sequence[str]
) -> Any | None:
    """Returns the float64 share from which a weight is computed by ops of some types.

    None if it is computed in another way.
    """
    weights = replica.states.of(weighing.Weighing).weights
    while tf.is_symbolic_tensor(weight) and weight.dtype.is_floating:
        if id(weight) in weights:
            return weights[id(weight)][1]
        op, graph = weight.op, weight.graph
        if op.type == "Mul" and "Mul" in passing:
            unknown = [x for x in op.inputs if tf.get_static_value(x) is None]
            weight = unknown[0] if len(unknown) == 1 else None
        elif op.type in passing:
            weight = op.inputs[0]
        elif op.type == "Placeholder" and graph.building_function:
            outer = [outer for outer, inner in graph.captures if inner is weight]
            weight = outer[0] if outer else None
        else:
            break
    return None


def if_equal(
    replica: context.ReplicaContext,
    gradients: Sequence[Any],
    weight: tf.Tensor,
    members: Sequence[int],
    who: str,
) -> list[Any]:
    """Returns gradients that wait for a check that the replicas' weights are equal.

    Args:
        replica: The replica whose gradients they are.
        gradients: The gradients.
        weight: The replica's weight, a float64 scalar.
        members: The replicas that take part.
        who: Who averages the gradients, for messages.
    """
    (total,) = base.communicate(
        "all_reduce",
        base.all_reduce_options("sum"),
        [weight],
        reductions.results("sum", [weight]),
        group=tuple(members),
        differentiable=False,
    )
    problem = (
        f"{who}{unknown_shapes.on_replica(replica)} is given a weight for gradients "
        "that get from other replicas by communication. Each is of the losses of "
        "several replicas, so that no weight of the replica that receives it is right, "
        "and the weights differ"
    )
    with tf.device(hosts.cpu_of(replica.device)):
        even = tf.abs(weight * len(members) - total) <= 1e-6 * tf.abs(total)
        message = [
            f"{problem}.",
            f"{who} at {errors.user_line()}",
            "weight of the replica, and of all:",
        ]
        vectors = [tf.reshape(x, [1]) for x in (weight, total)]
        assertion = unknown_shapes.fail_unless([even], message, vectors, _FIX)
    return evenness.wait_for(gradients, assertion)
