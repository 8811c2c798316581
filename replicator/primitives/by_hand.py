# SPDX-License-Identifier: Apache-2.0
"""Weighted means of gradients that a step takes by itself, without a wrapped optimizer.

Gradients that passed through communication are of the sum of all replicas' losses. If
their mean is weighted by `repl.weight`, as a wrapped optimizer weights it, they are
weighed by the replica whose loss they are of (weighing.py), so that the mean is the
gradient on one device. Nothing can weigh them by other weights, which may be computed
only after them: those must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import callers
from replicator.costs import hosts
from replicator.primitives import applied, base, reductions, unknown_shapes, weighing

_FIX = (
    "pass weight=repl.weight, if these are the replicas' shares of the examples; or "
    "multiply each replica's loss by its weight, and sum the gradients over the "
    "replicas."
)
_KEEPING = ("Cast", "Identity", "Reshape", "Squeeze", "Mul")  # still its shares


def of_mean(
    leaves: Sequence[Any], weight: tf.Tensor, members: Sequence[int]
) -> tuple[list[Any], bool]:
    """Has the gradients in a weighted mean weighed by whose losses they are of.

    Args:
        leaves: What the step averages: tensors and IndexedSlices.
        weight: This replica's weight, a float64 scalar.
        members: The replicas that take part.

    Returns:
        The leaves, which may wait for a run-time check that no weights are needed; and
        whether their mean is the gradient on one device, so that an optimizer that is
        given it has nothing to weigh.

    Raises:
        ArgumentError: An optimizer needs the same gradients unweighed.
        BuildAgain: They need to be weighed and were not in this attempt.
    """
    replica = context.require("all_reduce")
    own = replica.states.of(weighing.Weighing)
    if not own.taken or replica.mode.writing is not None:
        return list(leaves), False
    if callers.given_to_pass() is not None:
        return list(leaves), False
    count = tf.get_static_value(replica.shard.count)
    found = applied.contained(leaves, own.combined, count)
    if found and is_by_examples(replica, weight):
        who = 'all_reduce ("mean")'
        return weighing.claim(replica, leaves, True, who, found), True
    if weighing.passed(replica, found):
        return if_equal(replica, leaves, weight, members, "all_reduce"), False
    return list(leaves), False


def is_by_examples(replica: context.ReplicaContext, weight: Any) -> bool:
    """Whether a weight is `repl.weight`, possibly cast or multiplied by a constant."""
    return _behind(replica, weight, _KEEPING) is not None


def exact(replica: context.ReplicaContext, weight: Any) -> Any:
    """Returns the float64 share for `repl.weight`, possibly cast; else the weight.

    What users get is a float32, which would round means of float64 values.
    """
    found = _behind(replica, weight, ("Cast", "Identity"))
    return weight if found is None else found


def _behind(
    replica: context.ReplicaContext, weight: Any, passing: Sequence[str]
) -> Any | None:
    """Returns the float64 share from which a weight is computed by some types of ops.

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
        *("all_reduce", base.all_reduce_options("sum"), [weight]),
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
        shown = [tf.reshape(x, [1]) for x in (weight, total)]
        asserted = unknown_shapes.fail_unless([even], message, shown, _FIX)
    return weighing.waiting(gradients, asserted)
