# SPDX-License-Identifier: Apache-2.0
"""Reduces by compressors: what is made of a sum or a mean before they see it.

Called where all_reduce is, while the user's step_fn runs. What cannot be compressed
goes on to all_reduce: what is of integers or complex numbers, and rows of sparse
gradients, unless they are only cast.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from replicator import errors
from replicator.compressors.base import Compressor
from replicator.compressors.link import Link
from replicator.compressors.memory import Place
from replicator.graph.ir.placeholder import NO_POLICY, OperandPolicy
from replicator.primitives import all_gather, all_reduce, base, sparse

_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)

Leaf: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass(frozen=True)
class Call:
    """One call that reduces several tensors, on the replica being built.

    Attributes:
        op: "sum" or "mean".
        members: The replicas that take part.
        weight: What this one weighs in a mean; None: as much as the others.
        place: Where compressors keep what they remember.
        algorithm: How sums are made; None: the cheapest.
        scale: What gradients are multiplied by for a while, a loss scale; or None.
        differentiable: Whether results have gradients: those of exact sums.
    """

    op: str
    members: tuple[int, ...]
    weight: tf.Tensor | None
    place: Place
    algorithm: str | None = None
    scale: tf.Tensor | None = None
    differentiable: bool = False


def can_compress(compressor: Compressor | None, leaf: Leaf) -> bool:
    """Whether a compressor can do something about a tensor."""
    if compressor is None or leaf.dtype not in _DTYPES:
        return False
    return not isinstance(leaf, tf.IndexedSlices) or compressor.rows is not None


def reduce(
    call: Call,
    leaves: Sequence[Leaf],
    compressors: Sequence[Compressor | None],
    policies: Sequence[OperandPolicy] | None = None,
) -> list[Leaf]:
    """Reduces tensors, each by its compressor, or as it is.

    Args:
        call: What is common to all of them.
        leaves: Any number of them, dense and sparse.
        compressors: One for each; None where it travels as it is.
        policies: Of which variable each is, and how it is communicated.
    """
    known = list(policies or [NO_POLICY] * len(leaves))
    results: list[Any] = [None] * len(leaves)
    chosen = [
        one
        if one is not None
        and can_compress(one, leaf)
        and (len(call.members) > 1 or one.owes)
        else None
        for one, leaf in zip(compressors, leaves, strict=True)
    ]
    plain = [k for k, one in enumerate(chosen) if one is None]
    if plain:
        reduced = all_reduce.combine(
            *([leaves[k] for k in plain], call.op, call.weight),
            policies=[known[k] for k in plain],
            group=call.members,
            algorithm=call.algorithm,
        )
        for k, leaf in zip(plain, reduced, strict=True):
            results[k] = leaf
    if len(plain) == len(leaves):
        return results
    share = functools.partial(_scaled, by=_share(call))
    owing = any(one is not None and one.owes for one in chosen)
    is_spoilt = _is_spoilt(call, leaves) if owing else False
    for compressor, places in _by_compressor(chosen):
        link = Link(
            members=call.members,
            policies=tuple(known[k] for k in places),
            names=tuple(map(str, places)),
            place=call.place,
            algorithm=call.algorithm,
            scale=call.scale,
            is_spoilt=is_spoilt,
        )
        own = [share(leaves[k]) for k in places]
        reduced = _reduced(compressor, link, own, call.differentiable)
        for k, leaf in zip(places, reduced, strict=True):
            results[k] = _cast(leaf, leaves[k].dtype)
    return results


def _by_compressor(
    chosen: Sequence[Compressor | None],
) -> list[tuple[Compressor, list[int]]]:
    """Returns which tensors have the same compressor."""
    groups: list[tuple[Compressor, list[int]]] = []
    for k, compressor in enumerate(chosen):
        if compressor is None:
            continue
        for known, places in groups:
            if known is compressor or (
                type(known) is type(compressor) and known == compressor
            ):
                places.append(k)
                break
        else:
            groups.append((compressor, [k]))
    return groups


def _is_spoilt(call: Call, leaves: Sequence[Leaf]) -> tf.Tensor:
    """Returns whether any replica has what is not finite, and counts with it."""
    values = [x.values if isinstance(x, tf.IndexedSlices) else x for x in leaves]
    finite = [tf.reduce_all(tf.math.is_finite(x)) for x in values if x.dtype in _DTYPES]
    spoilt = tf.logical_not(tf.reduce_all(tf.stack(finite)))
    if call.weight is not None:
        spoilt &= tf.not_equal(call.weight, 0)
    (count,) = all_reduce.combine(
        [tf.cast(spoilt, tf.float32)], "sum", None, group=call.members
    )
    return count > 0


def _share(call: Call) -> tf.Tensor | None:
    """Returns what a replica's tensors are multiplied by to be its share of the result.

    Residuals are of such shares: they stay right where weights change.
    """
    if call.op == "sum":
        return None
    if call.weight is None:
        return tf.constant(1.0 / len(call.members), tf.float64)
    weight = tf.cast(call.weight, tf.float64)
    (total,) = all_reduce.combine([weight], "sum", None, group=call.members)
    return tf.math.divide_no_nan(weight, total)


def _scaled(leaf: Leaf, by: tf.Tensor | None) -> Leaf:
    """Returns a replica's share of a tensor, in float32 at least."""
    if isinstance(leaf, tf.IndexedSlices):
        values = _scaled(leaf.values, by)
        return tf.IndexedSlices(values, leaf.indices, leaf.dense_shape)
    wide = tf.cast(leaf, tf.float32) if leaf.dtype in base.HALF else leaf
    if by is None:
        return tf.identity(wide)
    factor = tf.cast(by, wide.dtype)
    # What is not finite would come through a factor of 0, and back by the gradient.
    spoils = tf.equal(factor, 0) & ~tf.math.is_finite(wide)
    return tf.where(spoils, tf.zeros_like(wide), wide) * factor


def _reduced(
    compressor: Compressor, link: Link, shares: Sequence[Leaf], differentiable: bool
) -> list[Leaf]:
    """Reduces what has one compressor."""
    results = list(shares)
    dense = []
    for n, leaf in enumerate(shares):
        if isinstance(leaf, tf.IndexedSlices):
            results[n] = _reduce_rows(compressor, leaf, link.of([n]))
        else:
            dense.append(n)
    if dense:
        given = [shares[n] for n in dense]
        made = compressor.reduce([tf.stop_gradient(x) for x in given], link.of(dense))
        totals = _checked(compressor, given, made)
        if differentiable:
            totals = _with_exact_gradients(given, totals, link)
        for n, total in zip(dense, totals, strict=True):
            results[n] = total
    return results


def _with_exact_gradients(
    shares: Sequence[tf.Tensor], totals: Sequence[tf.Tensor], link: Link
) -> Sequence[tf.Tensor]:
    """Returns totals whose gradients are those of the exact sums of the shares."""

    @tf.custom_gradient
    def made(*_: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            arrived = [tf.convert_to_tensor(d) for d in upstream]
            return all_reduce.reduce_dense(arrived, "sum", group=link.members)

        return list(map(tf.identity, totals)), gradient

    return made(*shares)


def _reduce_rows(
    compressor: Compressor, rows: tf.IndexedSlices, link: Link
) -> tf.IndexedSlices:
    """Gathers the rows of all replicas, cast, and adds up those of one index."""
    values, indices = all_gather.gather_dense(
        [tf.cast(rows.values, compressor.rows), rows.indices],
        axis=0,
        group=link.members,
        policies=[link.policies[0]] * 2,
    )
    gathered = tf.IndexedSlices(tf.cast(values, rows.dtype), indices, rows.dense_shape)
    return sparse.add_up(gathered)


def _cast(leaf: Leaf, dtype: tf.DType) -> Leaf:
    return leaf if leaf.dtype == dtype else tf.cast(leaf, dtype)


def _checked(
    compressor: Compressor, shares: Sequence[tf.Tensor], made: Any
) -> Sequence[tf.Tensor]:
    """Returns the totals that a compressor has made; it may be a user's own."""
    totals = list(getattr(made, "totals", ()))
    if len(totals) == len(list(getattr(made, "sent", ()))) == len(shares) and all(
        total.dtype == share.dtype and total.shape.is_compatible_with(share.shape)
        for total, share in zip(totals, shares, strict=True)
    ):
        return totals
    raise errors.ArgumentError(
        errors.compose(
            f"reduce of {type(compressor).__name__} returned {errors.shown(made)}.",
            [f"at {errors.user_line()}"],
            "return a Sums, whose `totals` and `sent` are like the tensors.",
        )
    )
