# SPDX-License-Identifier: Apache-2.0
"""all_reduce: one reduction over all replicas, with the result on every replica.

Meaning: every replica receives op(x_0, x_1, ..., x_{R-1}), element by element.
Dual: the gradients of all replicas are summed, and each replica takes its share of the
sum (reductions.py); sum and mean are their own duals.
Lowering: one of several algorithms (algorithms.py), each of which gives all replicas
the same bits.

Source: differentiating the sum of all replicas' losses is the convention of JAX's psum
and of torch's functional collectives; Horovod averages some gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.costs import cost
from replicator.graph.ir.placeholder import (
    NO_POLICY,
    Call,
    OperandPolicy,
    Placeholder,
    PrimitiveFacts,
)
from replicator.graph.lowering.matched import Matched
from replicator.primitives import (
    algorithms,
    base,
    by_hand,
    flows,
    groups,
    levels,
    packing,
    partials,
    reductions,
    sparse,
    sufficient,
    unknown_shapes,
    weighing,
    zeros,
)
from replicator.primitives.levels import Received

FACTS = PrimitiveFacts(algorithm="hub", same_for_all=True, reduces_for_all=True)


def all_reduce(
    value: Any,
    op: str = "sum",
    weight: Any = "auto",
    group: Any = None,
    algorithm: str | None = None,
) -> Any:
    """Reduces over all replicas and gives every replica the result.

    Users call the function in compressors/all_reduce.py, which documents it in full.

    Args:
        value: A nest of tensors, of the same dtypes and shapes on all replicas.
        op: One of REDUCTIONS.
        weight: For "mean": a scalar per replica; or "auto", see `weight_of`.
        group: The participating replicas, as for all primitives.
        algorithm: One of ALGORITHM_NAMES; None: the cheapest.

    Returns:
        A nest like `value`, the same bits on every replica, on this replica's device.

    Raises:
        ArgumentError: `op` is unknown or undefined for a dtype; or the algorithm is
            unknown or does not support it.
        ContextError: Called outside a step.
    """
    members = groups.members("all_reduce", group)
    reductions.check_op("all_reduce", op)
    algorithms.check("all_reduce", algorithm)
    leaves = base.flatten(value, "all_reduce")
    for leaf in leaves:
        reductions.check("all_reduce", leaf, op)
    if not leaves:
        return value
    weight = weight_of(op, weight)
    complete = weight is None
    if op == "mean" and weight is not None:
        weight = as_weight("all_reduce", weight)
        leaves, complete = by_hand.of_mean(leaves, weight, members)
    reduced = combine(leaves, op, weight, group=members, algorithm=algorithm)
    if complete:
        weighing.note_combined(reduced, op, members)
    return tf.nest.pack_sequence_as(value, reduced)


def weight_of(op: str, weight: Any) -> Any:
    """Returns the weight that `weight="auto"` stands for: `repl.weight`, or None.

    None where all replicas have the same number of examples, and in the mean of an
    assignment to a variable, which applies weights by itself.
    """
    if not (isinstance(weight, str) and weight == "auto"):
        return weight
    replica = context.require("all_reduce")
    if op != "mean" or replica.examples is None or replica.mode.writing is not None:
        return None
    return weighing.weight(replica)


def combine(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices],
    op: str,
    weight: Any,
    policies: Sequence[OperandPolicy] | None = None,
    group: tuple[int, ...] | None = None,
    algorithm: str | None = None,
    joinable: bool = False,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduces gradients over all replicas, each to where it is needed.

    Dense ones are reduced in one call, sparse ones by gathering their rows.

    Args:
        gradients: Any number of dense and sparse gradients.
        op: "sum" or "mean".
        weight: As for `all_reduce`.
        policies: The variable of each gradient, and how it is communicated.
        group: The ids of the participating replicas; all by default.
        algorithm: As for `all_reduce`.
        joinable: As for `reduce_dense`.

    Returns:
        The reduced gradients, on every replica; unread copies are pruned, so they cost
        no transfer.
    """
    leaves = base.flatten(list(gradients), "all_reduce")
    group = groups.members("all_reduce", None) if group is None else group
    if weight is not None:
        return _weighted_mean(leaves, op, weight, group, policies, algorithm, joinable)
    policies = policies or [NO_POLICY] * len(leaves)
    is_sparse = [isinstance(leaf, tf.IndexedSlices) for leaf in leaves]
    dense = [k for k in range(len(leaves)) if not is_sparse[k]]
    reduced = (
        reduce_dense(
            [leaves[k] for k in dense],
            op,
            group=group,
            policies=[policies[k] for k in dense],
            algorithm=algorithm,
            joinable=joinable,
        )
        if dense
        else []
    )
    results = iter(reductions.as_leaves(op, reduced))
    return [
        sparse.reduce(leaf, op, group, policy) if leaf_is_sparse else next(results)
        for leaf, leaf_is_sparse, policy in zip(
            leaves, is_sparse, policies, strict=True
        )
    ]


def reduce_dense(
    tensors: Sequence[tf.Tensor],
    op: str,
    when: tf.Tensor | None = None,
    of: Call | None = None,
    group: tuple[int, ...] | None = None,
    policies: Sequence[OperandPolicy] | None = None,
    algorithm: str | None = None,
    joinable: bool = False,
) -> list[tf.Tensor]:
    """Puts one all_reduce call for several tensors into the graph.

    Args:
        tensors: At least one dense tensor.
        op: One of REDUCTIONS, defined for every dtype.
        when: A bool scalar, equal on all replicas by construction. Where it is False at
            run time nothing is reduced, and the results are zeros.
        of: Inside a gradient: the call being differentiated.
        group: The participating replicas; by default all, or those of `of`.
        policies: The variable of each tensor, and how it is communicated.
        algorithm: As for `all_reduce`; a gradient uses its call's algorithm.
        joinable: Whether the call may be merged with others of this kind that come
            soon after it, unless it is in a function.

    Returns:
        The reduced tensors; for "argmin" and "argmax" all values, then all owners.
    """
    results = reductions.results(op, tensors)
    options = base.all_reduce_options(op, algorithm, of)
    if when is None:
        return base.communicate(
            "all_reduce",
            options,
            tensors,
            results,
            of=of,
            group=group,
            policies=policies,
            joinable=joinable and context.require("all_reduce").is_outermost,
        )
    return base.communicate(
        "all_reduce",
        options,
        [*tensors, when],
        results,
        differentiable=False,
        policies=policies,
        conditional=True,
    )


def _weighted_mean(
    leaves: Sequence[tf.Tensor | tf.IndexedSlices],
    op: str,
    weight: Any,
    group: tuple[int, ...],
    policies: Sequence[OperandPolicy] | None,
    algorithm: str | None,
    joinable: bool,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Sums the weighted values and the weights in one call, then divides."""
    if op != "mean":
        raise base.bad_argument(
            "all_reduce",
            f"was given a weight with op={errors.repr_of(op)}",
            'weights go with "mean".',
        )
    weight = as_weight("all_reduce", weight)

    def weighted(x: tf.Tensor) -> tf.Tensor:
        if x.dtype in base.HALF:
            x = tf.cast(x, tf.float32)
        factor = tf.cast(weight, x.dtype)
        # Inf and NaN would survive a factor of 0, here and in the gradient.
        masked = tf.equal(factor, 0) & ~tf.math.is_finite(tf.abs(x))
        return tf.where(masked, tf.zeros_like(x), x) * factor

    scaled = [_map_values(weighted, leaf) for leaf in leaves]
    if policies is not None:
        policies = [*policies, NO_POLICY]
    *sums, total = combine(
        [*scaled, weight], "sum", None, policies, group, algorithm, joinable
    )

    def divided(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tf.math.divide_no_nan(x, tf.cast(total, x.dtype)), dtype)

    return [
        _map_values(functools.partial(divided, dtype=leaf.dtype), summed)
        for leaf, summed in zip(leaves, sums, strict=True)
    ]


def as_weight(what: str, weight: Any) -> tf.Tensor:
    """Returns a weight as a scalar, wide enough to add up counts exactly.

    Args:
        what: The name of the call, for messages.
        weight: The user's argument.

    Raises:
        ArgumentError: It is not a real number.
    """
    leaves = base.flatten(weight, what)
    fix = "the weight is one real number per replica, e.g. its number of examples."
    if len(leaves) != 1 or not _is_real_scalar(leaves[0]):
        problem = f"was given weight={errors.repr_of(weight)}"
        raise base.bad_argument(what, problem, fix)
    number = unknown_shapes.of_shape(what, leaves[0], [], "weight", fix)
    return tf.cast(by_hand.exact(context.require(what), number), tf.float64)


def _is_real_scalar(x: tf.Tensor | tf.IndexedSlices) -> bool:
    number = x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool
    return isinstance(x, tf.Tensor) and number and x.shape.rank in (0, None)


def _map_values(
    function: Callable[[tf.Tensor], tf.Tensor], leaf: tf.Tensor | tf.IndexedSlices
) -> tf.Tensor | tf.IndexedSlices:
    """Applies a function to a tensor, or to the rows of IndexedSlices."""
    if not isinstance(leaf, tf.IndexedSlices):
        return function(leaf)
    return tf.IndexedSlices(function(leaf.values), leaf.indices, leaf.dense_shape)


def sum_floating(tensors: Sequence[tf.Tensor], of: Call) -> list[tf.Tensor | None]:
    """Sums the tensors through which gradients flow; None in place of the others."""
    flowing = flows.places(tensors)
    if not flowing:
        return [None] * len(tensors)
    sums = reduce_dense([tensors[k] for k in flowing], "sum", of=of)
    return flows.spread(sums, flowing, len(tensors))


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Builds the dual of an all_reduce, as the module's docstring defines it."""
    op = placed.call.options["op"]
    operands = placed.operands
    flowing = flows.places(operands)
    if not flowing:
        return [None] * len(operands)
    result_gradients = [upstream[k] for k in flowing]
    if op in ("sum", "mean"):
        gradients = reduce_dense(result_gradients, op, of=placed.call)
    else:
        gradients = reductions.share(
            op,
            [operands[k] for k in flowing],
            reductions.of_leaves(placed.results, flowing, len(operands)),
            reduce_dense(result_gradients, "sum", of=placed.call),
            placed.call,
        )
    return flows.spread(gradients, flowing, len(operands))


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Reduces each bucket of tensors by one of the algorithms.

    Small tensors are first packed into buckets. With the hub this does not change the
    order in which an element is summed; algorithms.py gives the others' orders.
    """
    matched = unknown_shapes.check_alike(matched)
    count = len(matched.operands[0])
    when = None
    if matched.calls[0].conditional:
        count -= 1
        when = matched.operands[0][count]
    # results[n][k] is what participant n receives for its k-th tensor: value, owner.
    results: list[list[Any]] = [[None] * count for _ in matched.operands]
    columns = [matched.column(k) for k in range(count)]
    remaining = list(range(count))
    if matched.options["op"] in ("sum", "mean") and when is None:
        shortcuts = (
            sufficient.reduce(matched, columns) if matched.policy.factors else {}
        )
        shortcuts |= zeros.reduce(matched, columns, set(remaining) - set(shortcuts))
        for k, received in shortcuts.items():
            remaining.remove(k)
            for row, tensor in zip(results, received, strict=True):
                row[k] = [tensor]
    policies = [matched.calls[0].policy(k)._replace(variable="") for k in remaining]
    places = cost.buckets([columns[k] for k in remaining], matched.policy, policies)
    buckets = [[remaining[place] for place in bucket] for bucket in places]
    reduced = [
        _reduce_one(matched, packs, when, bucket[0])
        for bucket, packs in zip(buckets, packing.pack(matched, buckets), strict=True)
    ]
    unpacked = packing.unpack(matched, buckets, reduced)
    for bucket, received in zip(buckets, unpacked, strict=True):
        for row, parts in zip(results, received, strict=True):
            for k, tensors in zip(bucket, zip(*parts, strict=True), strict=True):
                row[k] = tensors
    return [
        [tensor for part in zip(*row, strict=True) for tensor in part]
        for row in results
    ]


def _reduce_one(
    matched: Matched,
    column: Sequence[tf.Tensor],
    when: tf.Tensor | None,
    k: int,
) -> Received:
    """Reduces one tensor per replica; a conditional reduction is done on a hub.

    Args:
        matched: The communication.
        column: `column[n]` is the tensor of the n-th participant.
        when: Whether to reduce at run time; None: always.
        k: The index of the operand, or of the first operand packed into it.
    """
    if matched.crossing is not None:
        return partials.across(matched, column, when, matched.owner(k))
    if when is None:
        return algorithms.reduce(matched, column, k)
    matched.notes.algorithms.append(levels.display_name(matched, "hub"))
    hub = matched.hub(cost.tensor_bytes(column[0]), matched.owner(k))
    with tf.device(hub):
        parts = tf.cond(
            when,
            lambda: partials.combine(matched, column, hub),
            lambda: [tf.zeros_like(column[0])],
        )
    return levels.distribute(matched, parts, hub)
