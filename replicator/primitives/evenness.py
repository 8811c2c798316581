# SPDX-License-Identifier: Apache-2.0
"""Gradients that cannot be weighed wait for a check that nothing needs to be weighed.

Where replicas have equally many examples, each weighs 1. Where they do not, the check
names the optimizer, why its gradients cannot be weighed, and what to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.costs import hosts
from replicator.primitives import unknown_shapes


@dataclasses.dataclass(frozen=True)
class Usage:
    """How an optimizer uses gradients.

    Attributes:
        weighed: Whether gradients from other replicas are weighed by the replicas of
            their losses.
        who: The optimizer and how it combines, for messages.
        line: The user's line.
    """

    weighed: bool
    who: str
    line: str


def about_both(first: Usage, second: Usage) -> tuple[str, list[str], str]:
    """Returns the problem of gradients that two optimizers take, the sites, the fix.

    Args:
        first: The first claim.
        second: The second claim.
    """
    return (
        f"{first.who} is also given. They come from other replicas, weighted for one "
        "of the two by each replica's number of examples",
        [f"{claimant.who} at {claimant.line}" for claimant in (first, second)],
        "take the gradients of each optimizer with its own call of tape.gradient, "
        "with a tf.GradientTape(persistent=True); or feed batches that divide evenly "
        "among the replicas.",
    )


def about_unclear(calls: Sequence[str], claimant: Usage) -> tuple[str, list[str], str]:
    """Returns the problem of calls that cannot be weighed, the sites, the fix.

    Args:
        calls: The calls.
        claimant: The claim on their gradients.
    """
    return (
        "a gradient function of yours gets from other replicas by a call that only one "
        "of them sends or receives. Nothing tells what it sends, so it cannot be "
        "weighted by each replica's number of examples",
        [*calls, f"{claimant.who} at {claimant.line}"],
        "in the gradient function use all_reduce or all_gather; or leave it out: the "
        "calls of the forward pass have gradients; or feed batches that divide evenly "
        "among the replicas.",
    )


def about_kept(variable: Any, claimant: Usage) -> tuple[str, list[str], str]:
    """Returns the problem of gradients that a variable keeps, the sites, the fix.

    Args:
        variable: The variable, of which each replica has a value of its own.
        claimant: The claim on its value.
    """
    return (
        f"are read from variable {variable.name}. Gradients from other replicas would "
        "have to be weighted before they are written to it, by each replica's number "
        "of examples",
        [f"{claimant.who} at {claimant.line}"],
        "accumulate by repl.wrap_optimizer(optimizer, accumulation_steps=k); or feed "
        "batches that divide evenly among the replicas.",
    )


def if_even(
    replica: context.ReplicaContext,
    gradients: Sequence[Any],
    which: str,
    sites: Sequence[str],
    fix: str,
) -> list[Any]:
    """Makes gradients wait for a check that replicas have equally many examples.

    Each replica then weighs 1, so that nothing needs to be weighed.

    Args:
        replica: The replica whose gradients they are.
        gradients: The gradients.
        which: Which gradients they are, and why they cannot be weighed.
        sites: The calls; that of the optimizer is the last.
        fix: The way out.
    """
    who = sites[-1].rpartition(" at ")[0]
    problem = (
        f"{who}{unknown_shapes.on_replica(replica)} is given gradients that {which}, "
        "and these numbers differ"
    )
    shard: Any = replica.shard
    sizes = [shard.count, shard.total]
    if None not in map(tf.get_static_value, sizes):  # known statically, and uneven
        raise errors.ArgumentError(f"{problem}.", sites, fix)
    with tf.device(hosts.cpu_of(replica.device)):
        even = tf.equal(shard.count * replica.num_replicas, shard.total)
        message = [f"{problem}.", *sites, "examples of the replica, and of all:"]
        vectors = [tf.reshape(size, [1]) for size in sizes]
        assertion = unknown_shapes.fail_unless([even], message, vectors, fix)
    return wait_for(gradients, assertion)


def wait_for(gradients: Sequence[Any], assertion: tf.Operation) -> list[Any]:
    """Makes gradients wait for an assertion."""
    with tf.control_dependencies([assertion]):
        return [
            None
            if gradient is None
            else tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
            for gradient in gradients
        ]
