# SPDX-License-Identifier: Apache-2.0
"""What finds examples by numbers of rows, or cuts a batch at places of its own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.forms.programs.pairs import SQUARE, matrix, numbers
from tests.forms.programs.values import Builder, Made, calm, finite, rounded


def by_number(p: Builder) -> Made:
    """Finds examples, and puts them back, by numbers of rows."""
    a, dims = matrix(p)
    width, n, r, y = dims[1], p.n, tf.range(p.n), p.given["y"]
    ids, some = numbers(p), p.mask()
    idx, other = p.of(ids), p.of(ids)
    column = idx % int(width)
    where = tf.where(some)
    spread = tf.cast(tf.argsort(p.given["i"], stable=True), tf.int32)
    math, kept = tf.math, f"kept{p._step}"
    firm = rounded(a) if p.is_exact else rounded(p.given["x"])
    options: list[Any] = [
        lambda: (tf.gather(a, idx), dims),
        lambda: (tf.gather(tf.gather(a, idx), other), dims),
        lambda: (tf.gather_nd(a, idx[:, None]), dims),
        lambda: (tf.gather_nd(a, tf.stack([r, column], 1)), ("n",)),
        lambda: (tf.gather_nd(a, tf.stack([idx, column], 1)), ("n",)),
        lambda: (tf.gather_nd(a, tf.stack([idx, r % int(width)], -1)), ("n",)),
        lambda: (tf.gather_nd(a, column[:, None], batch_dims=1), ("n",)),
        lambda: (tf.gather(a, column[:, None], batch_dims=1), ("n", 1)),
        lambda: (
            tf.gather(a, tf.stack([column, 0 * column], 1), batch_dims=1),
            ("n", 2),
        ),
        lambda: (tf.gather(a, tf.stack([idx, other], 1)), ("n", 2, width)),
        lambda: (tf.gather(a, tf.stack([idx, other], 0)), (2, "n", width)),
        lambda: (tf.gather(a, tf.concat([idx, other], 0)), ("2n", width)),
        lambda: (tf.gather(a, tf.range(0, n, 2)), ("(n/2)", width)),
        lambda: (tf.gather(a, tf.range(n - 1, -1, -1)), dims),
        lambda: (tf.gather(a, where[:, 0]), (kept, width)),
        lambda: (
            tf.gather(tf.boolean_mask(a, some), tf.range(0)),
            (f"no{p._step}", width),
        ),
        lambda: (
            tf.concat([a[:1], tf.gather(a, where[:, 0])], 0),
            (f"more{p._step}", width),
        ),
        lambda: (
            tf.scatter_nd(where, tf.boolean_mask(a, some), tf.shape(a, tf.int64)),
            dims,
        ),
        lambda: (
            tf.tensor_scatter_nd_update(a, where, 2 * tf.boolean_mask(a, some)),
            dims,
        ),
        lambda: (tf.tensor_scatter_nd_add(a, where, tf.gather_nd(a, where)), dims),
        lambda: (tf.tensor_scatter_nd_update(a, spread[:, None], tf.sin(a)), dims),
        lambda: (tf.tensor_scatter_nd_update(a, r[:, None], tf.sin(a)), dims),
        lambda: (tf.tensor_scatter_nd_sub(a, idx[:, None], 0.3 * a), dims),
        lambda: (
            tf.tensor_scatter_nd_update(a, tf.stack([r, column], 1), y),
            dims,
        ),
        lambda: (
            tf.tensor_scatter_nd_max(firm, idx[:, None], firm[::-1]),
            ("n", firm.shape[1]),
        ),
        lambda: (tf.scatter_nd(idx[:, None], a, tf.shape(a)), dims),
        lambda: (tf.scatter_nd(tf.stack([idx, column], 1), y, tf.shape(a)), dims),
        lambda: (math.unsorted_segment_sum(a, idx, n), dims),
        lambda: (math.unsorted_segment_mean(a, idx, n), dims),
        lambda: (math.unsorted_segment_sqrt_n(a, r // 2, n), dims),
        lambda: (math.unsorted_segment_prod(tf.tanh(a) + 0.5, idx, n), dims),
        lambda: (
            _bounded(math.unsorted_segment_max(firm, idx, n)),
            ("n", firm.shape[1]),
        ),
        lambda: (
            _bounded(math.unsorted_segment_min(firm, idx, n)),
            ("n", firm.shape[1]),
        ),
        lambda: (math.segment_sum(a, r // 2), ("(n/2)", width)),
        lambda: (math.segment_mean(a, tf.sort(idx)), (f"groups{p._step}", width)),
        lambda: (
            math.unsorted_segment_sum(a, tf.where(some, r, -tf.ones_like(r)), n),
            dims,
        ),
        lambda: (
            math.unsorted_segment_sum(tf.boolean_mask(a, some), where[:, 0], n),
            dims,
        ),
        lambda: (tf.one_hot(idx, n, dtype=p.dtype) @ a, dims),
        lambda: (
            tf.matmul(tf.one_hot(idx, n, dtype=p.dtype), a, transpose_a=True),
            dims,
        ),
        lambda: (a * p.number(idx)[:, None] / 5, dims),
        lambda: (
            tf.gather(a, math.top_k(y, tf.minimum(n, 3)).indices),
            (f"top{p._step}", width),
        ),
        lambda: (tf.gather(a, tf.argsort(tf.argsort(y))), dims),
        lambda: (tf.gather(a, tf.searchsorted(tf.sort(y), y)), dims),
        lambda: (
            tf.RaggedTensor.from_value_rowids(a, tf.sort(idx), n).to_tensor()[:, :1],
            (f"ragged{p._step}", f"first{p._step}", width),
        ),
        lambda: (
            tf.reduce_sum(tf.RaggedTensor.from_value_rowids(a, tf.sort(idx), n), 1),
            dims,
        ),
    ]
    made, found = p.of(options)()
    return calm(finite(made)), found


def _bounded(a: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.abs(a) < 1e6, a, tf.zeros_like(a))


def elsewhere(p: Builder) -> Made:
    """Cuts a batch at places of its own, puts it together otherwise, goes by rows."""
    a, dims = matrix(p)
    width, n, r, y = int(dims[1]), p.n, tf.range(p.n), p.given["y"]
    half, i0 = n // 2, tf.cast(p.given["i"][0], tf.int32) % n
    some = p.mask()
    later = tf.boolean_mask(a, tf.logical_not(some))
    options: list[Any] = [
        lambda: (tf.split(a, [half, n - half])[1], ("(n-n/2)", width)),
        lambda: (tf.concat(tf.split(a, [half, n - half])[::-1], 0), dims),
        lambda: (tf.split(a, [1, n - 1])[0] * y[:, None], dims),
        lambda: (tf.concat([a[half:], a[:half]], 0), dims),
        lambda: (tf.concat([tf.boolean_mask(a, some), later], 0), dims),
        lambda: (a - a[:1], dims),
        lambda: (a - a[0], dims),
        lambda: (a - a[-1:], dims),
        lambda: (a * a[i0], dims),
        lambda: (a - tf.gather(a, i0), dims),
        lambda: (a[i0:], (f"from{p._step}", width)),
        lambda: (a[: i0 + 1], (f"to{p._step}", width)),
        lambda: (a[-2:], (f"last{p._step}", width)),
        lambda: (a[1::2], (f"odd{p._step}", width)),
        lambda: (tf.slice(a, [i0, 0], [1, width]), (1, width)),
        lambda: (tf.slice(a, [0, 1], [n, width - 1]), ("n", width - 1)),
        lambda: (tf.reshape(tf.tile(a, [2, 1]), [2, n, width]), (2, "n", width)),
        lambda: (tf.reshape(tf.tile(a, [1, 2]), [2 * n, width]), ("2n", width)),
        lambda: (tf.reshape(tf.tile(a, [1, 2]), [-1, 2, width]), ("n", 2, width)),
        lambda: (tf.reshape(tf.repeat(a, 2, 0), [n, 2, width]), ("n", 2, width)),
        lambda: (tf.reshape(tf.repeat(a, 2, 0), [2, n, width]), (2, "n", width)),
        lambda: (tf.reshape(tf.repeat(a, n, 0), [n, n, width])[:, :, 0], SQUARE),
        lambda: (tf.reshape(tf.tile(a, [n, 1]), [n, n, width])[:, :, 0], SQUARE),
        lambda: (tf.reshape(a, [width, n]), (width, "n")),
        lambda: (tf.reshape(a, [width, -1]), (width, "n")),
        lambda: (tf.reshape(a, [-1, n]), (width, "n")),
        lambda: (tf.reshape(tf.transpose(a), tf.shape(a)), dims),
        lambda: (tf.reshape(tf.transpose(a), [n, -1]), dims),
        lambda: (tf.reshape(a, [n * width]), (f"(n*{width})",)),
        lambda: (tf.concat([a, tf.zeros([n, 1], p.dtype)], 1), ("n", width + 1)),
        lambda: (tf.concat([a, tf.ones([1, width], p.dtype)], 0)[:-1], dims),
        lambda: (tf.concat([a, tf.reverse(a, [0])], 0), ("2n", width)),
        lambda: (tf.concat([a, a], 0)[n:], dims),
        lambda: (tf.concat([a, 2 * a], 0)[half : half + n], dims),
        lambda: (tf.pad(a, [[0, n], [0, 0]])[: n + half], ("(n+n/2)", width)),
        lambda: (tf.pad(a, [[1, 1], [0, 0]])[2:], dims),
        lambda: (tf.stack([a, tf.roll(a, 1, 0)], 1), ("n", 2, width)),
        lambda: (tf.reduce_mean(tf.stack([y, tf.abs(y - 0.137), y * y], 1), 1), ("n",)),
        lambda: (tf.reduce_mean(tf.stack([y, tf.roll(y, 1, 0)], 0), 0), ("n",)),
        lambda: (tf.stack([y, y * y], 0), (2, "n")),
        lambda: (a * tf.linspace(p.number(0), p.number(1), n)[:, None], dims),
        lambda: (a * p.number(tf.range(n, 0, -1))[:, None] / 7, dims),
        lambda: (p.number(tf.range(2 * n)) / 14, ("2n",)),
        lambda: (
            tf.zeros([n, width], p.dtype) + tf.ones([2 * n, 1], p.dtype)[:n],
            dims,
        ),
        lambda: (tf.fill([n, n], tf.reduce_mean(y)), SQUARE),
        lambda: (tf.nn.avg_pool1d(a[None], 2, 1, "SAME")[0], dims),
        lambda: (
            tf.reverse_sequence(tf.transpose(a), tf.fill([width], i0 + 1), 1, 0),
            (width, "n"),
        ),
        lambda: (_over_rows(p, a), dims[1:]),
        lambda: (_written(p, a), dims),
        lambda: (_replaced(p, a), dims),
        lambda: (
            tf.map_fn(
                lambda k: tf.tanh(a[k]) - a[(k + 1) % n], r, fn_output_signature=p.dtype
            ),
            dims,
        ),
        lambda: (
            tf.map_fn(
                lambda one: one[0] * p.number(one[1]) / 5 + a[one[1]],
                (a, r),
                fn_output_signature=p.dtype,
            ),
            dims,
        ),
        lambda: (tf.vectorized_map(lambda k: tf.tanh(a[k]) * tf.gather(y, k), r), dims),
        lambda: (
            tf.vectorized_map(lambda one: one[0] * tf.reduce_sum(one[1] * y), (a, y)),
            dims,
        ),
        lambda: (tf.foldl(lambda c, k: 0.5 * c + a[k], r, a[0]), dims[1:]),
    ]
    made, found = p.of(options)()
    return calm(made), found


def _over_rows(p: Builder, a: tf.Tensor) -> tf.Tensor:
    """Adds up rows one by one."""

    def turn(k: tf.Tensor, c: tf.Tensor) -> Any:
        return k + 1, tf.tanh(0.5 * c + a[k] * p.given["y"][k])

    return tf.while_loop(lambda k, c: k < p.n, turn, (0, tf.zeros_like(a[0])))[1]


def _written(p: Builder, a: tf.Tensor) -> tf.Tensor:
    """Writes a row per turn, from the last to the first."""
    array = tf.TensorArray(p.dtype, size=p.n, element_shape=a.shape[1:])

    def turn(k: tf.Tensor, kept: Any) -> Any:
        return k + 1, kept.write(p.n - 1 - k, tf.sin(a[k]))

    return tf.while_loop(lambda k, _: k < p.n, turn, (0, array))[1].stack()


def _replaced(p: Builder, a: tf.Tensor) -> tf.Tensor:
    """Replaces a row per turn by what it and the one before say."""

    def turn(k: tf.Tensor, c: tf.Tensor) -> Any:
        new = tf.tanh(c[k] + 0.5 * c[tf.maximum(k - 1, 0)])
        return k + 1, tf.tensor_scatter_nd_update(c, [[k]], new[None])

    return tf.while_loop(lambda k, _: k < p.n, turn, (0, a))[1]


MAKERS = (by_number, by_number, elsewhere, elsewhere)
