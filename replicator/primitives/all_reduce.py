# SPDX-License-Identifier: Apache-2.0
"""all_reduce: one reduction over all replicas, its result on every replica.

Meaning: every replica receives op(x_0, x_1, ..., x_{R-1}), element by element.
Dual: the gradients of all replicas are summed, and each one takes its share of them
(reductions.py); sum and mean are their own duals.
Lowering: by one of several algorithms (algorithms.py), each of which gives all replicas
the same bits.

Source: the convention that what is differentiated is the sum of all replicas' losses is
that of JAX's psum and torch's functional collectives; Horovod averages some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import _tf, context, errors
from replicator.costs import cost
from replicator.graph.ir.placeholder import (
    NO_POLICY,
    Call,
    Facts,
    OperandPolicy,
    Placeholder,
)
from replicator.graph.lowering.matched import Matched
from replicator.primitives import (
    algorithms,
    base,
    flows,
    groups,
    levels,
    packing,
    partials,
    reductions,
    sparse,
    sufficient,
    unknown_shapes,
    zeros,
)
from replicator.primitives.levels import Received

FACTS = Facts(algorithm="hub", same_for_all=True, reduces_for_all=True)


def all_reduce(
    value: Any,
    op: str = "sum",
    weight: Any = None,
    group: Any = None,
    algorithm: str | None = None,
) -> Any:
    """Reduces over all replicas and gives every replica the result.

    What users call is that of compressors/all_reduce.py, which says more.

    Args:
        value: A nest of tensors, alike in dtype and shape on all replicas.
        op: One of REDUCTIONS.
        weight: For "mean": a scalar per replica.
        group: The replicas that take part, as for all primitives.
        algorithm: One of ALGORITHM_NAMES; None: the cheapest.

    Returns:
        A nest like `value`, the same bits on every replica, on this replica's device.

    Raises:
        ArgumentError: `op` is unknown or has no meaning for a dtype; or the algorithm
            is unknown, or cannot do it.
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
    if op == "mean" and weight is None:
        _warn_of_uneven_shards()
    reduced = _reduce_leaves(leaves, op, weight, members, algorithm=algorithm)
    return tf.nest.pack_sequence_as(value, reduced)


def _warn_of_uneven_shards() -> None:
    """Warns once of a mean over replicas that do not have as many examples each."""
    replica = context.require("all_reduce")
    if replica.examples is None or replica.writing is not None:
        return
    logging.log_first_n(
        logging.WARNING,
        'The all_reduce of "mean" at %s weighs all replicas alike, though their shards '
        "of a batch may hold different numbers of examples, or none. Where it shall be "
        "the mean over the examples, pass weight=repl.weight.",
        1,
        errors.user_line(),
    )


def combine(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices],
    op: str,
    weight: Any,
    policies: Sequence[OperandPolicy] | None = None,
    group: tuple[int, ...] | None = None,
    algorithm: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduces gradients over all replicas, each where it is needed.

    Args:
        gradients: Any number of them, dense and sparse.
        op: "sum" or "mean".
        weight: As for `all_reduce`.
        policies: Of which variable each gradient is, and how it is communicated.
        group: The replicas that take part, by their ids; all, unless given.
        algorithm: As for `all_reduce`.

    Returns:
        The reduced gradients, on every replica: what nothing reads is not sent.
    """
    return _reduce_leaves(
        base.flatten(list(gradients), "all_reduce"),
        op,
        weight,
        groups.members("all_reduce", None) if group is None else group,
        policies,
        algorithm,
    )


def _reduce_leaves(
    leaves: Sequence[tf.Tensor | tf.IndexedSlices],
    op: str,
    weight: Any,
    group: tuple[int, ...],
    policies: Sequence[OperandPolicy] | None = None,
    algorithm: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduces dense leaves in one call and sparse ones by gathering their rows."""
    if weight is not None:
        return _weighted_mean(leaves, op, weight, group, policies, algorithm)
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
        )
        if dense
        else []
    )
    results = iter(reductions.as_leaves(op, reduced))
    return [
        sparse.reduce(leaf, op, group, policy) if own else next(results)
        for leaf, own, policy in zip(leaves, is_sparse, policies, strict=True)
    ]


def reduce_dense(
    tensors: Sequence[tf.Tensor],
    op: str,
    when: tf.Tensor | None = None,
    of: Call | None = None,
    group: tuple[int, ...] | None = None,
    policies: Sequence[OperandPolicy] | None = None,
    algorithm: str | None = None,
) -> list[tf.Tensor]:
    """Puts one all_reduce call for several tensors into the graph.

    Args:
        tensors: At least one dense tensor.
        op: One of REDUCTIONS, with a meaning for every dtype.
        when: A bool scalar, equal on all replicas by construction. Where it is False at
            run time nothing is reduced, and zeros come back.
        of: Inside a gradient: the call that is differentiated.
        group: The replicas that take part; all, unless given, or those of `of`.
        policies: Of which variable each tensor is, and how it is communicated.
        algorithm: As for `all_reduce`; inside a gradient, that of the call which is
            differentiated.

    Returns:
        The reduced tensors; for "argmin" and "argmax" all owners behind all values.
    """
    results = reductions.results(op, tensors)
    options = base.all_reduce_options(op, algorithm, of)
    if when is None:
        return base.communicate(
            *("all_reduce", options, tensors, results),
            of=of,
            group=group,
            policies=policies,
        )
    return base.communicate(
        "all_reduce",
        {**options, "when": True},
        [*tensors, when],
        results,
        differentiable=False,
        policies=policies,
    )


def _weighted_mean(
    leaves: Sequence[tf.Tensor | tf.IndexedSlices],
    op: str,
    weight: Any,
    group: tuple[int, ...],
    policies: Sequence[OperandPolicy] | None,
    algorithm: str | None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Sums the weighted values and the weights in one call, and divides."""
    if op != "mean":
        raise base.bad_argument(
            "all_reduce",
            f"was given a weight with op={errors.shown(op)}",
            'weights go with "mean".',
        )
    weight = as_weight("all_reduce", weight)

    def weighted(x: tf.Tensor) -> tf.Tensor:
        if x.dtype in base.HALF:
            x = tf.cast(x, tf.float32)
        factor = tf.cast(weight, x.dtype)
        # What is not finite would come through a factor of 0, and back by the gradient.
        spoils = tf.equal(factor, 0) & ~tf.math.is_finite(tf.abs(x))
        return tf.where(spoils, tf.zeros_like(x), x) * factor

    scaled = [_map_values(weighted, leaf) for leaf in leaves]
    if policies is not None:
        policies = [*policies, NO_POLICY]
    *sums, total = _reduce_leaves(
        [*scaled, weight], "sum", None, group, policies, algorithm
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
        what: What was called, for messages.
        weight: As the user gave it.

    Raises:
        ArgumentError: It is no real number.
    """
    given = base.flatten(weight, what)
    fix = "the weight is one real number per replica, e.g. its number of examples."
    if len(given) != 1 or not _is_real_scalar(given[0]):
        problem = f"was given weight={errors.shown(weight)}"
        raise base.bad_argument(what, problem, fix)
    number = unknown_shapes.of_shape(what, given[0], [], "weight", fix)
    return tf.cast(number, tf.float64)


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
    """Sums the tensors through which gradients flow; None for the others."""
    flowing = flows.places(tensors)
    if not flowing:
        return [None] * len(tensors)
    sums = reduce_dense([tensors[k] for k in flowing], "sum", of=of)
    return flows.spread(sums, flowing, len(tensors))


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Builds the dual of an all_reduce; see the module's docstring."""
    op = placed.call.options["op"]
    operands = placed.operands
    flowing = flows.places(operands)
    if not flowing:
        return [None] * len(operands)
    arrived = [upstream[k] for k in flowing]
    if op in ("sum", "mean"):
        back = reduce_dense(arrived, op, of=placed.call)
    else:
        back = reductions.share(
            op,
            [operands[k] for k in flowing],
            reductions.of_leaves(placed.results, flowing, len(operands)),
            reduce_dense(arrived, "sum", of=placed.call),
            placed.call,
        )
    return flows.spread(back, flowing, len(operands))


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Reduces each bucket of tensors by one of the algorithms.

    Small tensors are packed into buckets first. With the hub that leaves the order of
    each element's sum as it is; see algorithms.py for the order of the others.
    """
    matched = unknown_shapes.alike(matched)
    count = len(matched.operands[0])
    when = None
    if matched.options.get("when"):
        count -= 1
        when = matched.operands[0][count]
    # made[n][k] is what participant n receives for its k-th tensor: value, and owner.
    made: list[list[Any]] = [[None] * count for _ in matched.operands]
    columns = [matched.column(k) for k in range(count)]
    plain = list(range(count))
    if matched.options["op"] in ("sum", "mean") and when is None:
        done = sufficient.reduce(matched, columns) if matched.policy.factors else {}
        done |= zeros.reduce(matched, columns, set(plain) - set(done))
        for k, received in done.items():
            plain.remove(k)
            for own, tensor in zip(made, received, strict=True):
                own[k] = [tensor]
    apart = [matched.calls[0].policy(k)._replace(variable="") for k in plain]
    places = cost.buckets([columns[k] for k in plain], matched.policy, apart)
    buckets = [[plain[place] for place in bucket] for bucket in places]
    reduced = [
        _reduce_one(matched, packs, when, bucket[0])
        for bucket, packs in zip(buckets, packing.pack(matched, buckets), strict=True)
    ]
    unpacked = packing.unpack(matched, buckets, reduced)
    for bucket, received in zip(buckets, unpacked, strict=True):
        for own, parts in zip(made, received, strict=True):
            for k, tensors in zip(bucket, zip(*parts, strict=True), strict=True):
                own[k] = tensors
    return [
        [tensor for part in zip(*own, strict=True) for tensor in part] for own in made
    ]


def _reduce_one(
    matched: Matched,
    column: Sequence[tf.Tensor],
    when: tf.Tensor | None,
    k: int,
) -> Received:
    """Reduces one tensor per replica; what may not be due is reduced on a hub.

    Args:
        matched: The communication.
        column: `column[n]` is the tensor of the n-th participant.
        when: Whether it is due; None: it always is.
        k: Which operand it is, or the first of those that are packed in it.
    """
    if matched.crossing is not None:
        return partials.across(matched, column, when, matched.owner(k))
    if when is None:
        return algorithms.reduce(matched, column, k)
    matched.notes.algorithms.append(levels.said(matched, "hub"))
    hub = matched.hub(cost.tensor_bytes(column[0]), matched.owner(k))
    with tf.device(hub):
        parts = _tf.cond(
            when,
            lambda: partials.combine(matched, column, hub),
            lambda: [tf.zeros_like(column[0])],
        )
    return levels.hand_out(matched, parts, hub)
