# SPDX-License-Identifier: Apache-2.0
"""all_gather: every replica receives the tensors of all replicas.

Meaning: the replicas' tensors are stacked along a new leading axis, or concatenated
along an existing one, where their sizes may differ. Dual: each replica's slice of the
summed gradients, a reduce_scatter. Lowering: one device (the hub) concatenates the
tensors, and every device reads the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.costs import cost
from replicator.graph.ir.placeholder import (
    Call,
    OperandPolicy,
    Placeholder,
    PrimitiveFacts,
    Value,
)
from replicator.graph.lowering.matched import Matched
from replicator.primitives import axes, base, flows, groups, levels, unknown_shapes

FACTS = PrimitiveFacts(algorithm="hub", same_for_all=True, joins=True)


def all_gather(value: Any, axis: int | None = None, group: Any = None) -> Any:
    """Gives every replica the tensors of all replicas.

    Example:
        >>> for x in repl.run(lambda: repl.all_gather(repl.replica_id + 1)): print(x)
        tf.Tensor([1 2], shape=(2,), dtype=int32)
        tf.Tensor([1 2], shape=(2,), dtype=int32)

        Along an axis, sizes may differ: replica 0 passes [0], replica 1 passes [0, 1].

        >>> def step_fn():
        ...     return repl.all_gather(tf.range(repl.replica_id + 1), axis=0)
        >>> for x in repl.run(step_fn): print(x)
        tf.Tensor([0 0 1], shape=(3,), dtype=int32)
        tf.Tensor([0 0 1], shape=(3,), dtype=int32)

    Args:
        value: A nest of tensors of any dtype. Dtypes and shapes are the same on all
            replicas, but sizes along `axis` may differ (and be zero).
        axis: None to stack along a new leading axis; else the axis along which to
            concatenate, counted from the end if negative.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.

    Returns:
        A nest like `value`, on this replica's device. A leaf of shape [...] becomes
        [len(group), ...] without an axis, else [..., sum of the replicas' sizes, ...],
        where the sum is statically unknown, since sizes may differ.

    Raises:
        ArgumentError: `axis` does not exist, or a leaf is not a dense tensor.
        ContextError: Called outside a step.
    """
    members = groups.members("all_gather", group)
    axes.check("all_gather", axis, optional=True)
    leaves = base.flatten(value, "all_gather")
    if any(isinstance(leaf, tf.IndexedSlices) for leaf in leaves):
        raise base.bad_argument(
            "all_gather",
            "cannot join IndexedSlices",
            "gather its values and indices with axis=0, or all_reduce it.",
        )
    if not leaves:
        return value
    return tf.nest.pack_sequence_as(value, gather_dense(leaves, axis, group=members))


def gather_dense(
    tensors: Sequence[tf.Tensor],
    axis: int | None,
    of: Call | None = None,
    group: tuple[int, ...] | None = None,
    policies: Sequence[OperandPolicy] | None = None,
) -> list[tf.Tensor]:
    """Puts one all_gather call for several tensors into the graph.

    Args:
        tensors: At least one dense tensor.
        axis: As for `all_gather`.
        of: Inside a gradient: the call being differentiated.
        group: The participating replicas; required except inside a gradient.
        policies: The variable of each tensor, and the replica that needs it.

    Returns:
        The gathered tensors.
    """
    if group is None:
        assert of is not None, "a call says who takes part, or whose gradient it is"
        group = of.group
    joined = [axes.joined("all_gather", Value.of(t), axis, len(group)) for t in tensors]
    return base.communicate(
        "all_gather",
        {"axis": axis},
        tensors,
        results=joined,
        agreed=joined,
        of=of,
        group=group,
        policies=policies,
    )


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Gives each replica its slice of the summed gradients."""
    flowing = flows.places(upstream)
    if not flowing:
        return [None] * len(upstream)
    gradients = _sum_slices(
        [upstream[k] for k in flowing],
        like=[placed.operands[k] for k in flowing],
        axis=placed.call.options["axis"],
        of=placed.call,
    )
    return flows.spread(gradients, flowing, len(upstream))


def _sum_slices(
    tensors: Sequence[tf.Tensor], like: Sequence[tf.Tensor], axis: int | None, of: Call
) -> list[tf.Tensor]:
    """Puts the reduce_scatter call of a gradient into the graph.

    Args:
        tensors: Shaped as all_gather's results, [R, ...] or concatenated along `axis`.
        like: `like[k]` has the shape of this replica's slice of `tensors[k]`.
        axis: As for all_gather.
        of: The call being differentiated.

    Returns:
        One tensor per entry of `like`, of its shape.
    """
    sizes = [
        tf.constant(1) if axis is None else tf.shape(template)[axis]
        for template in like
    ]
    results = [Value.of(template) for template in like]
    agreed = [Value.of(t) for t in [*tensors, *sizes]]
    return base.communicate(
        "reduce_scatter",
        {"op": "sum", "axis": axis, "sized": True},
        [*tensors, *sizes],
        results,
        agreed,
        of,
    )


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Concatenates on a hub, in replica order; all devices read the result.

    Moves bytes(result) in to the hub and (replicas - 1) * bytes(result) out again.
    Between hosts, each host sends its replicas' operands to each other host.
    """
    axis = matched.options["axis"]
    matched = unknown_shapes.check_alike(matched, axis)
    results = []
    for k in range(len(matched.operands[0])):
        column = matched.column(k)
        nbytes = len(column) * cost.tensor_bytes(column[0])
        owner = matched.owner(k)
        hub = matched.hub(nbytes, owner)
        if owner is None:
            results.append(levels.join_for_all(matched, column, axis, hub))
        else:
            joined = levels.join(matched, column, axis, hub)
            received = levels.distribute(matched, [joined], hub)
            results.append([part for (part,) in received])
    return [list(row) for row in zip(*results, strict=True)]
