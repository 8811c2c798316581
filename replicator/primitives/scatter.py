# SPDX-License-Identifier: Apache-2.0
"""scatter: each replica receives its slice of the root's value.

Meaning: the n-th replica of the group receives the n-th entry of the root's tensor, or
the n-th of its slices along an axis. Dual: the root gathers the gradients. Lowering:
the root's device splits the tensor, and each device reads its slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.graph.ir.placeholder import Placeholder, PrimitiveFacts
from replicator.graph.lowering.matched import Matched
from replicator.primitives import axes, base, flows, gather, groups, rooted

FACTS = PrimitiveFacts()


def scatter(
    value: Any, root: int = 0, axis: int | None = None, group: Any = None
) -> Any:
    """Gives each replica its slice of the root's value.

    Example:
        >>> def step_fn():
        ...     if repl.replica_id == 0:
        ...         return repl.scatter(tf.constant([[1, 2], [3, 4]]))
        ...     return repl.scatter(tf.TensorSpec([2, 2], tf.int32))
        >>> for x in repl.run(step_fn): print(x)
        tf.Tensor([1 2], shape=(2,), dtype=int32)
        tf.Tensor([3 4], shape=(2,), dtype=int32)

    Args:
        value: On the root a nest of tensors of any dtype, [len(group), ...] without an
            axis. On the others a nest of `tf.TensorSpec` with the dtypes and shapes of
            the root's whole tensors, or of tensors like them. Such tensors' values are
            not used and their gradients are zeros, but only replicas that pass tensors
            send gradients back to the root.
        root: The replica whose value is split, a member of the group.
        axis: None to give the n-th replica of the group `value[n]`; else the axis to
            split, counted from the end if negative. If its size is not a multiple of
            the number of replicas, the first ones receive one row more.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.

    Returns:
        A nest like `value` of this replica's slices, on its device: [...] without an
        axis, else of `value`'s rank.

    Raises:
        ArgumentError: `root` is not a replica, `axis` does not exist, `value` does not
            have one entry per replica, or a leaf is not a dense tensor.
        ContextError: Called outside a step.
    """
    members = groups.members("scatter", group)
    base.check_root("scatter", root, members)
    axes.check("scatter", axis, optional=True)
    operands, leaves = rooted.root_operands("scatter", value, root)
    if not leaves:
        return value
    index = members.index(context.require("scatter").replica_id)
    wholes = rooted.values(leaves)
    received = base.communicate(
        "scatter",
        {"root": root, "axis": axis},
        operands,
        [
            axes.slice_of("scatter", whole, axis, index, len(members))
            for whole in wholes
        ],
        agreed=wholes,
        group=members,
    )
    return tf.nest.pack_sequence_as(value, received)


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Gathers the gradients of the slices on the root."""
    options, operands = placed.call.options, placed.operands
    root, axis = options["root"], options["axis"]
    flowing = flows.places(upstream)
    if not flowing:
        return [None] * len(operands)
    slice_gradients = [upstream[k] for k in flowing]
    wholes = gather.gather_dense(slice_gradients, root, axis, of=placed.call)
    if not rooted.is_root(root):
        return rooted.zeros(operands, tied=True)
    gradients = rooted.zeros(operands, tied=False)
    for k, d in zip(flowing, wholes, strict=True):
        gradients[k] = d
    return gradients


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Splits on the root's device. Moves each other replica's slice to it."""
    options = matched.options
    root, axis = matched.group.index(options["root"]), options["axis"]
    count = len(matched.calls[root].agreed)
    results: list[list[tf.Tensor]] = [[] for _ in matched.operands]
    with tf.device(matched.devices[root]):
        for k in range(count):
            sizes = None
            if not options.get("gathered"):
                entries = len(results) if axis is None else None
                whole = rooted.as_agreed(matched, k, entries)
            else:
                whole = matched.operands[root][k]
                if axis is not None:
                    sizes = tf.stack([row[k - count] for row in matched.operands])
            pieces = axes.cut(whole, axis, len(results), sizes)
            for row, piece in zip(results, pieces, strict=True):
                row.append(piece)
    return results
