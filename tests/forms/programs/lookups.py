# SPDX-License-Identifier: Apache-2.0
"""Lookups, masks, segments, scatters, and integers of the batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.forms.programs import values
from tests.forms.programs.values import Builder, Made, calm, finite, rounded


def looked_up(p: Builder) -> Made:
    """Looks up rows of a variable by the batch's integers."""
    i, table = p.given["i"], p.variables["table"]

    def sparse():
        return tf.sparse.from_dense(tf.stack([i + 1, (i * 3) % 7 + 1], 1) % 7)

    options: list[Any] = [
        lambda: (tf.gather(table, i), ("n", 3)),
        lambda: (tf.nn.embedding_lookup(table, i[:, None]), ("n", 1, 3)),
        lambda: (
            tf.nn.embedding_lookup(table, tf.stack([i, (i + 1) % 7], 1)),
            ("n", 2, 3),
        ),
        lambda: (tf.one_hot(i, 7, dtype=p.dtype) @ table, ("n", 3)),
        lambda: (tf.gather(table, i, axis=0)[:, 0], ("n",)),
        lambda: (tf.gather_nd(table, tf.stack([i, i % 3], 1)), ("n",)),
        lambda: (tf.gather(table, tf.reduce_max(i)), (3,)),
        lambda: (tf.gather(p.variables["bank"], i % 4), ("n", 3)),
        lambda: (tf.gather(tf.tanh(table), tf.unique(i).y), (f"different{p._step}", 3)),
        lambda: (
            tf.gather(tf.gather(table, tf.unique(i)[0]), tf.unique(i)[1]),
            ("n", 3),
        ),
        lambda: (
            tf.nn.embedding_lookup_sparse(table, sparse(), None, combiner="sum"),
            (f"some{p._step}", 3),
        ),
        lambda: (
            tf.nn.safe_embedding_lookup_sparse(table, sparse(), combiner="mean"),
            (f"some{p._step}", 3),
        ),
        lambda: (tf.gather(table, tf.reverse(i, [0])), ("n", 3)),
        lambda: (tf.gather(tf.transpose(table), i, axis=1), (3, "n")),
    ]
    return p.of(options)()


def taken(p: Builder) -> Made:
    """Takes rows of a value: by integers, or by a mask."""
    a, dims = p.pick(values.has_rows)
    i, rest, step = p.given["i"], dims[1:], p._step
    n = tf.cast(p.n, i.dtype)
    some, kept = p.mask(), f"kept{step}"
    options: list[Any] = [
        lambda: (tf.gather(a, i % n), dims),
        lambda: (tf.gather(a, tf.range(p.n)[::-1]), dims),
        lambda: (tf.boolean_mask(a, some), (kept, *rest)),
        lambda: (tf.gather(a, tf.where(some)[:, 0]), (kept, *rest)),
        lambda: (tf.gather_nd(a, tf.where(some)), (kept, *rest)),
        lambda: (
            tf.concat(tf.dynamic_partition(a, tf.cast(i % 3, tf.int32), 3), 0),
            dims,
        ),
        lambda: (
            tf.dynamic_partition(a, tf.cast(i % 2, tf.int32), 2)[1],
            (kept, *rest),
        ),
        lambda: (_stitched(a, tf.cast(i % 3, tf.int32), p.n), dims),
        lambda: (tf.gather(a, tf.cast(tf.unique(i).idx, tf.int32)), dims),
        lambda: (tf.gather(a, [0, 0]), (2, *rest)),
        lambda: (tf.repeat(a, tf.cast(i % 3, tf.int32), 0), (f"repeated{step}", *rest)),
        lambda: (tf.tensor_scatter_nd_update(a, [[0]], tf.zeros_like(a)[:1]), dims),
        lambda: (tf.tensor_scatter_nd_add(a, (i % n)[:, None], 0.3 * a), dims),
    ]
    if rest and isinstance(rest[0], int):
        j = i % rest[0]
        pairs = tf.stack([tf.range(n), j], 1)
        options += [
            lambda: (tf.gather_nd(a, pairs), ("n", *rest[1:])),
            lambda: (tf.gather(a, j, batch_dims=1), ("n", *rest[1:])),
            lambda: (tf.gather(a, [0, rest[0] - 1], axis=1), ("n", 2, *rest[1:])),
            lambda: (
                tf.tensor_scatter_nd_update(a, pairs, tf.zeros_like(a)[:, 0]),
                dims,
            ),
        ]
    return p.of(options)()


def _stitched(a: tf.Tensor, which: tf.Tensor, n: tf.Tensor) -> tf.Tensor:
    parts = tf.dynamic_partition(a, which, 3)
    places = tf.dynamic_partition(tf.range(n), which, 3)
    return tf.dynamic_stitch(places, [k * part + part for k, part in enumerate(parts)])


def of_segments(p: Builder) -> Made:
    """Reduces groups of examples."""
    a, dims = p.pick(values.has_rows)
    b, others = p.decisive(values.has_rows)
    i, rest, tools = p.given["i"], dims[1:], tf.math
    firm = b if values.has_rows(others) else rounded(p.given["x"])
    groups = tf.sort(i)
    options: list[Any] = [
        lambda: (tools.unsorted_segment_sum(a, i % 5, 5), (5, *rest)),
        lambda: (tools.unsorted_segment_mean(a, i % 2, 2), (2, *rest)),
        lambda: (tools.unsorted_segment_sqrt_n(a, i % 4, 4), (4, *rest)),
        lambda: (
            finite(tf.tanh(tools.unsorted_segment_prod(tf.tanh(a) + 0.5, i % 3, 3))),
            (3, *rest),
        ),
        lambda: (
            _bounded(tools.unsorted_segment_max(firm, i % 3, 3)),
            (3, *others[1:]),
        ),
        lambda: (
            _bounded(tools.unsorted_segment_min(firm, i % 3, 3)),
            (3, *others[1:]),
        ),
        lambda: (tools.segment_sum(a, groups), (f"groups{p._step}", *rest)),
        lambda: (tools.segment_mean(a, groups), (f"groups{p._step}", *rest)),
        lambda: (
            tf.scatter_nd(
                (i % 5)[:, None],
                a,
                tf.concat([tf.cast([5], i.dtype), tf.shape(a, i.dtype)[1:]], 0),
            ),
            (5, *rest),
        ),
        lambda: (
            tf.einsum("nk,n->k", tf.one_hot(i % 3, 3, dtype=p.dtype), p.given["y"]),
            (3,),
        ),
        lambda: (tf.gather(tools.unsorted_segment_mean(a, i % 3, 3), i % 3) - a, dims),
        lambda: (
            tf.tensordot(tf.one_hot(i % 3, 3, dtype=p.dtype), a, [[0], [0]]),
            (3, *rest),
        ),
    ]
    made, found = p.of(options)()
    return calm(made), found


def _bounded(a: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.abs(a) < 1e6, a, tf.zeros_like(a))


def counted(p: Builder) -> Made:
    """Computes with integers, which are exact, and with truth values."""
    i, lengths, n = p.given["i"], p.given["lengths"], p.n
    whole = tf.cast(i, tf.int64)
    big = tf.constant(2**53 + 1, tf.int64)
    some = p.mask()

    def seven(a):
        return p.number(a % 7) / 7

    options: list[Any] = [
        lambda: (seven(tf.reduce_sum(whole + big)), ()),
        lambda: (seven(tf.reduce_max(whole) * big), ()),
        lambda: (seven(tf.reduce_sum(i)), ()),
        lambda: (seven(tf.reduce_mean(i)), ()),
        lambda: (seven(tf.reduce_prod(lengths)), ()),
        lambda: (seven(tf.cumsum(whole * big)), ("n",)),
        lambda: (
            p.number(tf.math.bincount(tf.cast(i, tf.int32), minlength=7, maxlength=7))
            / 5,
            (7,),
        ),
        lambda: (
            p.number(tf.unique_with_counts(i).count) / 5,
            (f"different{p._step}",),
        ),
        lambda: (p.number(tf.size(tf.unique(i).y)) / 7, ()),
        lambda: (p.number(tf.range(n)) / 7, ("n",)),
        lambda: (p.number(tf.equal(tf.range(n)[:, None], tf.range(n))), ("n", "n")),
        lambda: (tf.eye(n, dtype=p.dtype), ("n", "n")),
        lambda: (p.number(tf.equal(i[:, None], i[None])), ("n", "n")),
        lambda: (p.number(tf.reduce_any(some)), ()),
        lambda: (p.number(tf.reduce_all(some)), ()),
        lambda: (p.number(tf.logical_and(some, tf.logical_not(p.mask()))), ("n",)),
        lambda: (p.number(tf.math.count_nonzero(some)) / 3, ()),
        lambda: (p.number(tf.shape(p.given["z"])[0] - n) / 3, ()),
        lambda: (p.number(tf.reduce_max(lengths)) / 4, ()),
        lambda: (tf.fill([n, 2], tf.reduce_mean(p.given["y"])), ("n", 2)),
        lambda: (tf.ones([n], p.dtype) / p.number(n), ("n",)),
        lambda: (p.number(tf.math.floormod(tf.range(n), 2)), ("n",)),
        lambda: (
            p.number(tf.strings.to_number(tf.strings.as_string(i), tf.float32)) / 7,
            ("n",),
        ),
        lambda: (
            p.number(tf.strings.length(tf.strings.reduce_join(tf.strings.as_string(i))))
            / 7,
            (),
        ),
        lambda: (p.number(tf.bitwise.bitwise_xor(i, i // 2)) / 7, ("n",)),
        lambda: (
            p.number(
                tf.histogram_fixed_width(p.given["y"], tf.cast([-2, 2], p.dtype), 3)
            )
            / 5,
            (3,),
        ),
        lambda: (p.number(tf.math.confusion_matrix(i % 3, lengths % 3, 3)) / 5, (3, 3)),
        lambda: (p.number(tf.cast(p.given["y"], tf.int32)) / 3, ("n",)),
        lambda: (
            p.number(
                tf.nn.in_top_k(
                    tf.cast(i % 3, tf.int32), tf.cast(p.given["x"], tf.float32), 2
                )
            ),
            ("n",),
        ),
        lambda: (p.number(tf.sort(i)), ("n",)),
        lambda: (p.number(tf.searchsorted([2, 4], tf.cast(i, tf.int32))), ("n",)),
    ]
    return p.of(options)()


MAKERS = (
    looked_up,
    looked_up,
    taken,
    taken,
    taken,
    of_segments,
    of_segments,
    counted,
    counted,
)
