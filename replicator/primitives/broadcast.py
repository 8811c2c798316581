# SPDX-License-Identifier: Apache-2.0
"""broadcast: every replica receives the root's value.

Meaning: every replica receives replica `root`'s tensor. Dual: the root receives the sum
of all replicas' gradients; the others get zeros. Lowering: every device reads the
root's tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.graph.ir.placeholder import Call, Placeholder, PrimitiveFacts, Value
from replicator.graph.lowering.matched import Matched
from replicator.primitives import all_reduce, base, groups, levels, rooted

FACTS = PrimitiveFacts(same_for_all=True)


def broadcast(value: Any, root: int = 0, group: Any = None) -> Any:
    """Gives every replica the root's value.

    Example:
        >>> for x in repl.run(lambda: repl.broadcast(repl.replica_id, root=1)): print(x)
        tf.Tensor(1, shape=(), dtype=int32)
        tf.Tensor(1, shape=(), dtype=int32)

    Args:
        value: On the root a nest of tensors of any dtype and shape. On the others a
            nest of `tf.TensorSpec` with the root's dtypes and shapes, or of tensors
            like the root's. Such tensors' values are not used and their gradients are
            zeros, but only replicas that pass tensors send gradients back to the root.
        root: The replica whose value is sent, a member of the group.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.

    Returns:
        A nest like `value` with the root's tensors, on this replica's device.

    Raises:
        ArgumentError: `root` is not a replica, or a leaf is not a dense tensor.
        ContextError: Called outside a step.
    """
    members = groups.members("broadcast", group)
    base.check_root("broadcast", root, members)
    operands, leaves = rooted.root_operands("broadcast", value, root)
    if not leaves:
        return value
    received = base.communicate(
        "broadcast",
        {"root": root},
        operands,
        rooted.values(leaves),
        agreed=rooted.values(leaves),
        group=members,
    )
    return tf.nest.pack_sequence_as(value, received)


def send(
    tensors: Sequence[tf.Tensor],
    results: Sequence[Value],
    witnesses: Sequence[tf.Tensor],
    root: int,
    of: Call,
) -> list[tf.Tensor]:
    """Puts the broadcast call of a gradient into the graph.

    Args:
        tensors: On the root, the tensors to send; unused elsewhere.
        results: Dtype and static shape of each.
        witnesses: Empty, or one tensor per result, of its dtype and shape. Their values
            are never used; they make the tapes that watch them record the call.
        root: The replica that sends.
        of: The call being differentiated.

    Returns:
        The root's tensors.
    """
    sent = list(tensors) if rooted.is_root(root) else []
    return base.communicate(
        "broadcast",
        {"root": root},
        [*sent, *witnesses],
        results,
        differentiable=bool(witnesses),
        agreed=results,
        of=of,
    )


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Sums the gradients on the root; every replica builds the same ops.

    The root too: otherwise second derivatives would communicate on some replicas only.
    """
    totals = all_reduce.sum_floating(upstream, of=placed.call)
    count = len(totals)
    root = placed.call.options["root"]
    at_root = base.differing(lambda replica_id: replica_id == root)
    gradients: list[tf.Tensor | None] = []
    for k in range(len(placed.operands)):
        total = totals[k % count]
        gradients.append(
            None
            if total is None
            else tf.where(at_root if k < count else False, total, tf.zeros_like(total))
        )
    return gradients


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Passes the root's tensors to all replicas.

    Moves (replicas - 1) * bytes(value); between hosts, once to each.
    """
    root = matched.group.index(matched.options["root"])
    with tf.device(matched.devices[root]):
        sent = [
            rooted.as_agreed(matched, k) for k in range(len(matched.calls[root].agreed))
        ]
    return levels.distribute(matched, sent, matched.devices[root])
