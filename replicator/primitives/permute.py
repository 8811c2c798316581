# SPDX-License-Identifier: Apache-2.0
"""permute: tensors move between replicas, by pairs (source, destination).

Meaning: the destination of each pair receives its source's tensor; a replica that is no
destination receives zeros, as in JAX's ppermute. `shift` moves tensors around the ring
of replicas. Dual: permute with the pairs reversed. Lowering: the destination reads the
source's tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, context, errors
from replicator.graph.ir.placeholder import Call, Placeholder, PrimitiveFacts
from replicator.graph.lowering.matched import Matched
from replicator.primitives import base, flows, groups, rooted, unknown_shapes

FACTS = PrimitiveFacts()

Pairs = Sequence[tuple[int, int]]


def permute(value: Any, pairs: Pairs, group: Any = None) -> Any:
    """Sends tensors from replica to replica, by pairs (source, destination).

    Example:
        >>> pairs = [(0, 1)]  # from replica 0 to replica 1
        >>> values = repl.run(lambda: repl.permute(repl.replica_id + 5, pairs))
        >>> for x in values: print(x)
        tf.Tensor(0, shape=(), dtype=int32)
        tf.Tensor(5, shape=(), dtype=int32)

    Args:
        value: A nest of tensors of any dtype, of the same dtypes and shapes on all
            replicas.
        pairs: (source, destination), the ids of members of the group; the same pairs on
            all replicas. Each replica is the source of at most one pair and the
            destination of at most one; source and destination may be the same.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.

    Returns:
        A nest like `value` with the tensors of this replica's source, on this replica's
        device; zeros if it is not a destination.

    Raises:
        ArgumentError: A pair names a replica outside the group, a replica is source or
            destination twice, or a leaf is not a dense tensor.
        ContextError: Called outside a step.
    """
    members = groups.members("permute", group)
    return _move("permute", value, _checked(pairs, members), members)


def shift(value: Any, offset: int = 1, group: Any = None) -> Any:
    """Sends tensors around the ring of replicas.

    Example:
        >>> repl = replicator.Replicator(["CPU:0", "CPU:1", "CPU:2"])
        >>> [int(x) for x in repl.run(lambda: repl.shift(repl.replica_id))]
        [2, 0, 1]

    Args:
        value: As for `permute`.
        offset: The n-th replica of the group sends its tensors to the one at index
            n + offset, modulo the size of the group. May be negative.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.

    Returns:
        A nest like `value` with the tensors of the replica `offset` positions before
        this one, on this replica's device.

    Raises:
        ArgumentError: `offset` is not a Python int, or a leaf is not a dense tensor.
        ContextError: Called outside a step.
    """
    members = groups.members("shift", group)
    if not arguments.is_whole(offset, -arguments.LARGEST):
        raise base.bad_argument(
            "shift",
            f"was given offset={errors.repr_of(offset)}",
            "offset is a Python int.",
        )
    count = len(members)
    pairs = [
        (source, members[(n + offset) % count]) for n, source in enumerate(members)
    ]
    return _move("shift", value, pairs, members)


def _checked(pairs: Any, members: Sequence[int]) -> Pairs:
    """Checks the user's pairs; returns them in the order of their sources."""
    problem = ""
    try:
        checked = sorted((source, destination) for source, destination in pairs)
    except base.UNCONVERTED:
        problem, checked = "which are not pairs", []
    num_replicas = context.require("permute").num_replicas
    for end, name in enumerate(("source", "destination")):
        seen: set[int] = set()
        for replica_id in (pair[end] for pair in checked):
            base.check_replica("permute", name, replica_id, num_replicas)
            if replica_id not in members:
                problem = f"but replica {replica_id} is not in the group"
            elif replica_id in seen:
                problem = f"in which replica {replica_id} is {name} twice"
            seen.add(replica_id)
    if problem:
        raise base.bad_argument(
            "permute",
            f"was given pairs={errors.repr_of(pairs)}, {problem}",
            "pass pairs (source, destination) of ids of replicas in the group "
            f"{list(members)}, each at most once as source and once as destination.",
        )
    return checked


def _move(what: str, value: Any, pairs: Pairs, members: tuple[int, ...]) -> Any:
    leaves = base.flatten(value, what)
    rooted.check_dense(what, leaves, "move")
    if not leaves:
        return value
    return tf.nest.pack_sequence_as(value, move(leaves, pairs, group=members))


def move(
    tensors: Sequence[tf.Tensor],
    pairs: Pairs,
    of: Call | None = None,
    group: tuple[int, ...] | None = None,
) -> list[tf.Tensor]:
    """Puts one permute call for several tensors into the graph.

    Args:
        tensors: At least one dense tensor.
        pairs: (source, destination), in the order of the sources.
        of: Inside a gradient: the call being differentiated.
        group: The participating replicas; by default all, or those of `of`.

    Returns:
        The source's tensors, or zeros.
    """
    return base.communicate(
        "permute",
        {"pairs": [list(pair) for pair in pairs]},
        tensors,
        rooted.values(tensors),
        of=of,
        group=group,
    )


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Moves the gradients back to their sources."""
    flowing = flows.places(upstream)
    if not flowing:
        return [None] * len(upstream)
    reversed_pairs = sorted(
        (there, here) for here, there in placed.call.options["pairs"]
    )
    gradients = move([upstream[k] for k in flowing], reversed_pairs, of=placed.call)
    return flows.spread(gradients, flowing, len(upstream))


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Has each destination read its source's tensors. Moves bytes(value) per pair."""
    source_of = {there: here for here, there in matched.options["pairs"]}
    results = []
    for n, (operands, device) in enumerate(
        zip(matched.operands, matched.devices, strict=True)
    ):
        source = source_of.get(matched.group[n])
        with tf.device(device):
            if source is None:
                results.append([tf.zeros_like(x) for x in operands])
                continue
            ends = matched.group.index(source), n
            results.append(
                [_source_tensor(matched, ends, k) for k in range(len(operands))]
            )
    return results


def _source_tensor(matched: Matched, ends: tuple[int, int], k: int) -> tf.Tensor:
    """Returns the source's tensor, checked to be of the shape of the destination's."""
    pair = [matched.operands[n][k] for n in ends]
    if not all(map(unknown_shapes.is_known, pair)):
        pair = unknown_shapes.check(
            matched,
            pair,
            unknown_shapes.equal,
            "the tensors of source and destination differ in shape",
            unknown_shapes.ONE_SHAPE,
            ends,
        )
    return tf.identity(pair[0])
