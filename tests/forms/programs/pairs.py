# SPDX-License-Identifier: Apache-2.0
"""Matrices of pairs of examples, and numbers of rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.forms.programs import values
from tests.forms.programs.values import Builder, Made, calm, finite, rounded

SQUARE = ("n", "n")


def matrix(p: Builder) -> tuple[tf.Tensor, tuple[str | int, ...]]:
    a, dims = p.pick(values.is_matrix)
    return (a, dims) if values.is_matrix(dims) else (p.given["x"], ("n", 3))


def _square(p: Builder) -> tf.Tensor:
    a, dims = p.pick(lambda d: d == SQUARE)
    return a if dims == SQUARE and a.shape.rank == 2 else square(p)[0]


def numbers(p: Builder) -> list[tf.Tensor]:
    """Returns numbers of rows, one per example: each once, some twice, moved."""
    i, n, r = tf.cast(p.given["i"], tf.int32), p.n, tf.range(p.n)
    return [
        *(r, n - 1 - r, (r + 1) % n, r // 2, i % n, r % 2 % n, tf.zeros_like(r)),
        *(tf.argsort(i, stable=True), tf.roll(r, 1, 0), tf.reverse(r, [0]), r * 1),
        *(tf.cast(tf.argsort(p.given["y"]), tf.int32), tf.minimum(r, i), r - r % 2),
        *(tf.sort(i % n), tf.concat([r[1:], r[:1]], 0), tf.where(p.mask(), r, i % n)),
        tf.maximum(tf.cumsum(tf.cast(p.mask(), tf.int32)) - 1, 0),
    ]


def square(p: Builder) -> Made:
    """Compares all examples with all: products, distances, labels, numbers."""
    a, _ = matrix(p)
    y, i, n, r = p.given["y"], p.given["i"] % 3, p.n, tf.range(p.n)
    unit = tf.math.l2_normalize(a, 1, 0.1)
    idx = p.of(numbers(p))
    same = p.number(tf.equal(i[:, None], i[None]))

    def distances() -> tf.Tensor:
        return tf.reduce_sum((a[:, None] - a[None]) ** 2, -1)

    options: list[Any] = [
        lambda: a @ tf.transpose(a),
        lambda: tf.matmul(unit, unit, transpose_b=True),
        lambda: tf.matmul(unit, tf.gather(a, idx), transpose_b=True),
        distances,
        lambda: tf.norm(tf.tanh(a)[:, None] - a[None] + 1.1137, axis=-1),
        lambda: tf.einsum("nd,md->nm", a, tf.tanh(a)),
        lambda: tf.einsum("nd,md,n->nm", a, a, y),
        lambda: tf.reduce_sum(a[:, None] * tf.sin(a[None]), 2),
        lambda: tf.tensordot(a, unit, [[1], [1]]),
        lambda: tf.tensordot(y, y, 0),
        lambda: same - tf.eye(n, dtype=p.dtype),
        lambda: same * distances(),
        lambda: tf.where(tf.not_equal(i[:, None], i), distances(), p.number(0)),
        lambda: tf.where(r[:, None] > r[None], y[:, None], y),
        lambda: p.number(r[:, None] - r) / 7,
        lambda: p.number(tf.logical_and(p.mask()[:, None], p.mask()[None])),
        lambda: tf.nn.softmax(unit @ tf.transpose(unit) - 9 * tf.eye(n, dtype=p.dtype)),
        lambda: tf.nn.softmax(tf.matmul(a, unit, transpose_b=True), 0),
        lambda: tf.exp(-distances()) * (1 - tf.eye(n, dtype=p.dtype)),
        lambda: tf.one_hot(idx, n, dtype=p.dtype),
        lambda: tf.one_hot(idx, n, axis=0, dtype=p.dtype) * y,
        lambda: tf.linalg.diag(y),
        lambda: tf.sequence_mask(idx, n, p.dtype) * y[:, None],
        lambda: tf.broadcast_to(y[:, None], [n, n]) - tf.broadcast_to(y, [n, n]),
        lambda: tf.meshgrid(y, tf.sin(y))[0] + tf.meshgrid(y, tf.sin(y))[1],
        lambda: tf.linalg.band_part(tf.ones([n, n], p.dtype), -1, 0) * y,
        lambda: tf.scatter_nd(tf.stack([r, idx], 1), y, [n, n]),
        lambda: tf.map_fn(lambda one: tf.linalg.matvec(unit, one), a),
        lambda: tf.vectorized_map(lambda one: tf.linalg.matvec(a, one), unit),
        lambda: tf.vectorized_map(lambda k: tf.reduce_sum(a * a[k], 1), r),
        lambda: tf.reshape(tf.repeat(y, n, 0) * tf.tile(y, [n]), [n, n]),
        lambda: p.number(y[:, None] > y) * y,
    ]
    return calm(p.of(options)() / 2), SQUARE


def of_square(p: Builder) -> Made:
    """Takes elements, rows and columns of a matrix of pairs, or folds it."""
    s, n, r, y = _square(p), p.n, tf.range(p.n), p.given["y"]
    a, (_, width) = matrix(p)
    ids = numbers(p)
    idx, other = p.of(ids), p.of(ids)
    few = tf.minimum(n, 2)
    firm = rounded(s) if p.is_exact else p.number(r[:, None] * 3 % 7 - r)
    off = tf.logical_not(tf.eye(n, dtype=tf.bool))
    best = tf.math.top_k(firm, few).indices

    def pairs(one: tf.Tensor, two: tf.Tensor) -> tf.Tensor:
        return tf.stack([one, two], 1)

    vectors: list[Any] = [
        lambda: tf.gather_nd(s, pairs(r, r)),
        lambda: tf.gather_nd(s, pairs(r, idx)),
        lambda: tf.gather_nd(s, pairs(idx, r)),
        lambda: tf.gather_nd(s, pairs(idx, other)),
        lambda: tf.gather_nd(s, tf.concat([r[:, None], idx[:, None]], 1)),
        lambda: tf.gather_nd(s, tf.transpose(tf.stack([r, idx]))),
        lambda: tf.gather_nd(s, idx[:, None], batch_dims=1),
        lambda: tf.gather(s, idx, batch_dims=1),
        lambda: tf.gather(tf.transpose(s), idx, batch_dims=1),
        lambda: tf.gather(tf.reshape(s, [-1]), r * n + idx),
        lambda: tf.gather(s, tf.cast(tf.argmax(firm, 1), tf.int32), batch_dims=1),
        lambda: tf.linalg.diag_part(s),
        lambda: tf.einsum("nn->n", s),
        lambda: tf.einsum("nm,nm->n", s, tf.transpose(s)),
        lambda: tf.reduce_mean(s, 0) - tf.reduce_mean(s, 1),
        lambda: tf.reduce_logsumexp(s, 0) - tf.reduce_logsumexp(s, 1),
        lambda: tf.reduce_max(firm, 0) + tf.reduce_min(firm, 1),
        lambda: tf.linalg.matvec(s, y),
        lambda: tf.linalg.matvec(s, y, transpose_a=True),
        lambda: tf.nn.sparse_softmax_cross_entropy_with_logits(r, s),
        lambda: tf.nn.sparse_softmax_cross_entropy_with_logits(idx, tf.transpose(s)),
        lambda: tf.nn.softmax_cross_entropy_with_logits(tf.eye(n, dtype=p.dtype), s),
        lambda: tf.reduce_sum(tf.gather(s, best, batch_dims=1), 1),
        lambda: tf.reduce_sum(tf.gather(y, best), 1),
        lambda: p.number(tf.argmax(firm, 0)) / 5,
        lambda: p.number(tf.math.count_nonzero(off, 1)) / 5,
        lambda: tf.math.divide_no_nan(
            tf.reduce_sum(tf.where(off, s, tf.zeros_like(s)), 1), p.number(n - 1)
        ),
        lambda: finite(
            tf.reduce_mean(tf.reshape(tf.boolean_mask(s, off), [n, n - 1]), 1)
        ),
        lambda: finite(tf.reduce_min(tf.where(off, firm, firm + 9), 1)),
        lambda: tf.reshape(s, [-1])[:: n + 1],
    ]
    matrices: list[Any] = [
        lambda: tf.transpose(s),
        lambda: s + tf.transpose(s),
        lambda: s @ s / 3,
        lambda: tf.matmul(s, s, transpose_a=True) / 3,
        lambda: tf.linalg.set_diag(s, y),
        lambda: tf.linalg.band_part(s, 0, -1),
        lambda: tf.tensor_scatter_nd_update(s, pairs(r, r), y),
        lambda: tf.tensor_scatter_nd_add(s, pairs(r, idx), y),
        lambda: tf.tensor_scatter_nd_update(s, r[:, None], s[:, ::-1]),
        lambda: tf.gather(s, idx),
        lambda: tf.gather(s, idx, axis=1),
        lambda: tf.gather(tf.gather(s, idx), other, axis=1),
        lambda: tf.cumsum(s, int(p.rng.integers(2))),
        lambda: tf.roll(s, 1, int(p.rng.integers(2))),
        lambda: tf.reverse(s, [int(p.rng.integers(2))]),
        lambda: tf.nn.log_softmax(s, int(p.rng.integers(2))) / 3,
        lambda: s - tf.reduce_mean(s, 0) - tf.reduce_mean(s, 1, keepdims=True),
        lambda: tf.where(tf.equal(idx[:, None], idx), s, tf.zeros_like(s)),
        lambda: s * y,
        lambda: s * y[:, None],
        lambda: tf.linalg.inv(
            tf.matmul(s, s, transpose_b=True) / 9 + tf.eye(n, dtype=p.dtype)
        ),
        lambda: tf.sort(firm, int(p.rng.integers(2))),
        lambda: tf.map_fn(lambda one: tf.tanh(one) * tf.reduce_sum(one), s),
        lambda: tf.vectorized_map(lambda k: s[k] - s[:, k], r),
        lambda: tf.math.unsorted_segment_sum(s, idx, n),
        lambda: tf.broadcast_to(s[:1], [n, n]) + s[:, :1],
    ]
    rows: list[Any] = [
        lambda: (s @ a / 2, ("n", width)),
        lambda: (tf.matmul(s, a, transpose_a=True) / 2, ("n", width)),
        lambda: (tf.einsum("nm,nd->md", s, a) / 2, ("n", width)),
        lambda: (tf.einsum("nd,nm,me->de", a, s, a) / 9, (width, width)),
        lambda: (tf.matmul(a, s, transpose_a=True) / 2, (width, "n")),
        lambda: (tf.tensordot(s, a, 1) / 2, ("n", width)),
        lambda: (tf.reduce_mean(tf.gather(a, best), 1), ("n", width)),
        lambda: (tf.gather(a, best), ("n", f"few{p._step}", width)),
        lambda: (tf.gather(s, best, batch_dims=1), ("n", f"few{p._step}")),
        lambda: (tf.linalg.trace(s) / 5, ()),
        lambda: (tf.reshape(s, [-1]), ("(n*n)",)),
        lambda: (tf.boolean_mask(s, off), (f"off{p._step}",)),
        lambda: (tf.boolean_mask(s, firm > 0), (f"over{p._step}",)),
        lambda: (tf.gather_nd(s, tf.where(firm > 0)), (f"over{p._step}",)),
        lambda: (tf.gather(a, tf.where(off)[:, 1]), (f"off{p._step}", width)),
        lambda: (tf.gather(y, tf.where(off)[:, 0]), (f"off{p._step}",)),
        lambda: (s[:, :1] * a, ("n", width)),
        lambda: (tf.concat([s, a], 1), ("n", f"(n+{width})")),
        lambda: (tf.stack([s, tf.transpose(s)], 2), ("n", "n", 2)),
        lambda: (tf.concat([s, tf.transpose(s)], 0), ("2n", "n")),
        lambda: (s[1:, 1:], ("(n-1)", "(n-1)")),
        lambda: (tf.reshape(s, [n, n, 1]), ("n", "n", 1)),
        lambda: (tf.einsum("nm,md->nmd", s, a)[:, :, 0], SQUARE),
    ]
    options = [lambda: (p.of(vectors)(), ("n",))] * 3
    options += [lambda: (p.of(matrices)(), SQUARE)] * 2 + [lambda: p.of(rows)()] * 2
    made, dims = p.of(options)()
    return calm(made), dims


MAKERS = (square, of_square, of_square)
