# SPDX-License-Identifier: Apache-2.0
"""gather: the root receives the tensors of all replicas.

Meaning: the replicas' tensors are stacked along a new leading axis, or concatenated
along an existing one, where their sizes may differ; the other replicas receive nothing.
Dual: scatter, in slices of the gathered sizes. Lowering: the root's device concatenates
the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.graph.ir.placeholder import Call, Placeholder, PrimitiveFacts
from replicator.graph.lowering.matched import Matched
from replicator.primitives import (
    axes,
    base,
    flows,
    groups,
    levels,
    rooted,
    unknown_shapes,
)

FACTS = PrimitiveFacts(joins=True)


def gather(
    value: Any, root: int = 0, axis: int | None = None, group: Any = None
) -> Any:
    """Gives the root the tensors of all replicas.

    The other replicas' losses do not depend on what the root computes from the tensors.
    For gradients to come back, differentiate `Replicator.linked(loss)` there.

    Example:
        >>> def step_fn():
        ...     both = repl.gather(repl.replica_id + 1.0, root=0)
        ...     return tf.zeros([2]) if both is None else both  # None on replica 1
        >>> for x in repl.run(step_fn): print(x)
        tf.Tensor([1. 2.], shape=(2,), dtype=float32)
        tf.Tensor([0. 0.], shape=(2,), dtype=float32)

    Args:
        value: A nest of tensors of any dtype. Dtypes and shapes are the same on all
            replicas, but sizes along `axis` may differ (and be zero).
        root: The replica that receives them, a member of the group.
        axis: None to stack along a new leading axis; else the axis along which to
            concatenate, counted from the end if negative.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.

    Returns:
        On the root a nest like `value`, as `all_gather` would return; None on the
        others.

    Raises:
        ArgumentError: `root` is not a replica, `axis` does not exist, or a leaf is not
            a dense tensor.
        ContextError: Called outside a step.
    """
    members = groups.members("gather", group)
    base.check_root("gather", root, members)
    axes.check("gather", axis, optional=True)
    leaves = base.flatten(value, "gather")
    rooted.check_dense("gather", leaves, "join")
    received = gather_dense(leaves, root, axis, group=members) if leaves else []
    return tf.nest.pack_sequence_as(value, received) if rooted.is_root(root) else None


def gather_dense(
    tensors: Sequence[tf.Tensor],
    root: int,
    axis: int | None,
    of: Call | None = None,
    group: tuple[int, ...] | None = None,
) -> list[tf.Tensor]:
    """Puts one gather call for several tensors into the graph.

    Args:
        tensors: At least one dense tensor.
        root: The replica that receives them.
        axis: As for `gather`.
        of: Inside a gradient: the call being differentiated.
        group: The participating replicas; required except inside a gradient.

    Returns:
        The gathered tensors on the root, nothing elsewhere.
    """
    if group is None:
        assert of is not None, "a call says who takes part, or whose gradient it is"
        group = of.group
    at_root = rooted.is_root(root)
    joined = [
        axes.joined("gather", value, axis, len(group))
        for value in rooted.values(tensors)
    ]
    return base.communicate(
        "gather",
        {"root": root, "axis": axis},
        tensors,
        joined if at_root else [],
        agreed=joined,
        of=of,
        group=group,
        receipt=not at_root,
    )


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Sends each replica its slice of the gradients."""
    operands, options = placed.operands, placed.call.options
    flowing = flows.places(operands)
    if not flowing:
        return [None] * len(operands)
    own_operands = [operands[k] for k in flowing]
    wholes, witnesses = [], own_operands
    if rooted.is_root(options["root"]):
        wholes = [upstream[k] for k in flowing]
        witnesses = [placed.results[k] for k in flowing]
    gradients = _send_slices(
        wholes,
        like=own_operands,
        witnesses=witnesses,
        root=options["root"],
        axis=options["axis"],
        of=placed.call,
    )
    return flows.spread(gradients, flowing, len(operands))


def _send_slices(
    wholes: Sequence[tf.Tensor],
    like: Sequence[tf.Tensor],
    witnesses: Sequence[tf.Tensor],
    root: int,
    axis: int | None,
    of: Call,
) -> list[tf.Tensor]:
    """Puts the scatter call of a gradient into the graph.

    Args:
        wholes: On the root, the tensors to split: concatenated over replicas along
            `axis`.
        like: `like[k]` has the shape of this replica's slice of `wholes[k]`.
        witnesses: One tensor per result. Their values are never used; they make the
            tapes that watch them record the call.
        root: The replica that sends.
        axis: As for gather.
        of: The call being differentiated.

    Returns:
        One tensor per entry of `like`, of its shape.
    """
    sizes = [] if axis is None else [tf.shape(template)[axis] for template in like]
    slices = rooted.values(like)
    return base.communicate(
        "scatter",
        {"root": root, "axis": axis, "gathered": True},
        [*wholes, *witnesses, *sizes],
        slices,
        agreed=[axes.joined("scatter", value, axis, len(of.group)) for value in slices],
        of=of,
    )


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Concatenates on the root's device, in replica order; moves all other operands."""
    root = matched.group.index(matched.options["root"])
    axis = matched.options["axis"]
    matched = unknown_shapes.check_alike(matched, axis)
    received = [
        levels.join(matched, matched.column(k), axis, matched.devices[root])
        for k in range(len(matched.operands[root]))
    ]
    return [received if n == root else [] for n in range(len(matched.operands))]
