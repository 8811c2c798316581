# SPDX-License-Identifier: Apache-2.0
"""Reduces tensors by compressors: scales them for a mean and groups them.

Called where all_reduce is, while the user's step_fn runs. Tensors that cannot be
compressed go to all_reduce: integers, complex numbers, and rows of sparse gradients
unless the compressor is a cast.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from replicator.compressors.base import Compressor, checked
from replicator.compressors.link import Link
from replicator.compressors.memory import StateStore
from replicator.graph.ir.placeholder import NO_POLICY, OperandPolicy
from replicator.primitives import all_gather, all_reduce, base, sparse

_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)

Leaf: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass(frozen=True)
class ReduceArguments:
    """The arguments that all tensors of one call share, on the replica being built.

    Attributes:
        op: "sum" or "mean".
        members: The participating replicas.
        weight: This replica's weight in a mean; None: all weigh the same.
        place: Holds the compressors' state.
        algorithm: How sums are computed; None: the cheapest.
        scale: The loss scale by which gradients are multiplied, or None.
        differentiable: Whether results have gradients, as if the sums were exact.
    """

    op: str
    members: tuple[int, ...]
    weight: tf.Tensor | None
    place: StateStore
    algorithm: str | None = None
    scale: tf.Tensor | None = None
    differentiable: bool = False


def can_compress(compressor: Compressor | None, leaf: Leaf) -> bool:
    """Whether a compressor applies to a tensor."""
    if compressor is None or leaf.dtype not in _DTYPES:
        return False
    return not isinstance(leaf, tf.IndexedSlices) or compressor.rows is not None


def reduce(
    call: ReduceArguments,
    leaves: Sequence[Leaf],
    compressors: Sequence[Compressor | None],
    policies: Sequence[OperandPolicy] | None = None,
) -> list[Leaf]:
    """Reduces tensors, each by its compressor or uncompressed.

    Args:
        call: The arguments that all tensors share.
        leaves: Any number of dense and sparse tensors.
        compressors: One per tensor; None: uncompressed.
        policies: The variable of each tensor, and how it is communicated.
    """
    all_policies = list(policies or [NO_POLICY] * len(leaves))
    results: list[Any] = [None] * len(leaves)
    applied = [
        compressor
        if compressor is not None
        and can_compress(compressor, leaf)
        and (len(call.members) > 1 or compressor.owes)
        else None
        for compressor, leaf in zip(compressors, leaves, strict=True)
    ]
    uncompressed = [k for k, compressor in enumerate(applied) if compressor is None]
    if uncompressed:
        reduced = all_reduce.combine(
            [leaves[k] for k in uncompressed],
            call.op,
            call.weight,
            policies=[all_policies[k] for k in uncompressed],
            group=call.members,
            algorithm=call.algorithm,
        )
        for k, leaf in zip(uncompressed, reduced, strict=True):
            results[k] = leaf
    if len(uncompressed) == len(leaves):
        return results
    share = functools.partial(_scaled, by=_share(call))
    feeds_back = any(
        compressor is not None and compressor.owes for compressor in applied
    )
    is_spoilt = _is_spoilt(call, leaves) if feeds_back else False
    for compressor, indices in _by_compressor(applied):
        link = Link(
            members=call.members,
            policies=tuple(all_policies[k] for k in indices),
            names=tuple(map(str, indices)),
            place=call.place,
            algorithm=call.algorithm,
            scale=call.scale,
            is_spoilt=is_spoilt,
        )
        shares = [share(leaves[k]) for k in indices]
        reduced = _reduced(compressor, link, shares, call.differentiable)
        for k, leaf in zip(indices, reduced, strict=True):
            results[k] = _cast(leaf, leaves[k].dtype)
    return results


def _by_compressor(
    compressors: Sequence[Compressor | None],
) -> list[tuple[Compressor, list[int]]]:
    """Groups the indices of tensors by their compressor."""
    groups: list[tuple[Compressor, list[int]]] = []
    for k, compressor in enumerate(compressors):
        if compressor is None:
            continue
        for other, indices in groups:
            if other is compressor or (
                type(other) is type(compressor) and other == compressor
            ):
                indices.append(k)
                break
        else:
            groups.append((compressor, [k]))
    return groups


def _is_spoilt(call: ReduceArguments, leaves: Sequence[Leaf]) -> tf.Tensor:
    """Returns whether any replica that does not weigh 0 has inf or NaN."""
    values = [x.values if isinstance(x, tf.IndexedSlices) else x for x in leaves]
    finite = [tf.reduce_all(tf.math.is_finite(x)) for x in values if x.dtype in _DTYPES]
    spoilt = tf.logical_not(tf.reduce_all(tf.stack(finite)))
    if call.weight is not None:
        spoilt &= tf.not_equal(call.weight, 0)
    (count,) = all_reduce.combine(
        [tf.cast(spoilt, tf.float32)], "sum", None, group=call.members
    )
    return count > 0


def _share(call: ReduceArguments) -> tf.Tensor | None:
    """Returns the factor that scales a replica's tensors to its share of the result.

    Residuals are parts of such shares, so they stay right when weights change.
    """
    if call.op == "sum":
        return None
    if call.weight is None:
        return tf.constant(1.0 / len(call.members), tf.float64)
    weight = tf.cast(call.weight, tf.float64)
    (total,) = all_reduce.combine([weight], "sum", None, group=call.members)
    return tf.math.divide_no_nan(weight, total)


def _scaled(leaf: Leaf, by: tf.Tensor | None) -> Leaf:
    """Returns a replica's share of a tensor, in at least 32 bits."""
    if isinstance(leaf, tf.IndexedSlices):
        values = _scaled(leaf.values, by)
        return tf.IndexedSlices(values, leaf.indices, leaf.dense_shape)
    wide = tf.cast(leaf, tf.float32) if leaf.dtype in base.HALF else leaf
    if by is None:
        return tf.identity(wide)
    factor = tf.cast(by, wide.dtype)
    # Inf and NaN would survive a factor of 0, here and in the gradient.
    masked = tf.equal(factor, 0) & ~tf.math.is_finite(wide)
    return tf.where(masked, tf.zeros_like(wide), wide) * factor


def _reduced(
    compressor: Compressor, link: Link, shares: Sequence[Leaf], differentiable: bool
) -> list[Leaf]:
    """Reduces the tensors of one compressor."""
    results = list(shares)
    dense = []
    for n, leaf in enumerate(shares):
        if isinstance(leaf, tf.IndexedSlices):
            results[n] = _reduce_rows(compressor, leaf, link.of([n]))
        else:
            dense.append(n)
    if dense:
        dense_shares = [shares[n] for n in dense]
        sums = compressor.reduce(
            [tf.stop_gradient(x) for x in dense_shares], link.of(dense)
        )
        totals = checked(compressor, dense_shares, sums).totals
        if differentiable:
            totals = _with_exact_gradients(dense_shares, totals, link)
        for n, total in zip(dense, totals, strict=True):
            results[n] = total
    return results


def _with_exact_gradients(
    shares: Sequence[tf.Tensor], totals: Sequence[tf.Tensor], link: Link
) -> Sequence[tf.Tensor]:
    """Returns the totals, with the gradients of the exact sums of the shares."""

    @tf.custom_gradient
    def exact(*_: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            gradients = [tf.convert_to_tensor(d) for d in upstream]
            return all_reduce.reduce_dense(gradients, "sum", group=link.members)

        return list(map(tf.identity, totals)), gradient

    return exact(*shares)


def _reduce_rows(
    compressor: Compressor, rows: tf.IndexedSlices, link: Link
) -> tf.IndexedSlices:
    """Gathers the cast rows of all replicas and sums rows of the same index."""
    values, indices = all_gather.gather_dense(
        [tf.cast(rows.values, compressor.rows), rows.indices],
        axis=0,
        group=link.members,
        policies=[link.policies[0]] * 2,
    )
    gathered = tf.IndexedSlices(tf.cast(values, rows.dtype), indices, rows.dense_shape)
    return sparse.add_up(gathered, 1, link.members, link.policies[0])


def _cast(leaf: Leaf, dtype: tf.DType) -> Leaf:
    return leaf if leaf.dtype == dtype else tf.cast(leaf, dtype)
