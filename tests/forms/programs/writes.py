# SPDX-License-Identifier: Apache-2.0
"""Writes to variables that are kept: averages, counts, memories, codebooks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.forms.programs.values import Builder, Made, calm, finite, rounded


def average(p: Builder) -> Made:
    """A moving average of the batch, read behind the write."""
    v = p.variables["average"]
    a, dims = p.pick(lambda d: d == ("n", 3))
    if dims != ("n", 3):
        a = p.given["x"]
    mean, share = tf.reduce_mean(a, 0), p.number(0.1)
    keep = p.number(p.mask())[:, None]
    options: list[Any] = [
        lambda: v.assign(0.9 * v + share * mean),
        lambda: v.assign_sub(share * (v - mean)),
        lambda: v.assign_add(tf.tanh(tf.reduce_sum(a, 0))),
        lambda: v.assign(tf.maximum(v, finite(tf.reduce_max(a, 0)))),
        lambda: v.assign(tf.reduce_sum(a * keep, 0) / (tf.reduce_sum(keep) + 1)),
        lambda: v.assign(tf.tanh(a[-1])),
        lambda: v.assign(
            tf.sort(rounded(a) if p.is_exact else p.given["x"], 0)[p.n // 2]
        ),
        lambda: v[1].assign(tf.reduce_mean(a)),
        lambda: v[:2].assign(calm(a[0, 1:])),
        lambda: v.scatter_update(tf.IndexedSlices(tf.reduce_mean(a, 0)[:2], [2, 0])),
        lambda: tf.cond(
            tf.reduce_sum(a) > 0.1,
            lambda: v.assign(calm(mean)),
            lambda: v.assign_add(mean),
        ),
    ]
    p.of(options)()
    return calm(v.read_value()), (3,)


def counted(p: Builder) -> Made:
    """A count beyond 2**53, in int64: exact."""
    v, i = p.variables["count"], tf.cast(p.given["i"], tf.int64)
    options: list[Any] = [
        lambda: v.assign_add(tf.cast(p.n, tf.int64)),
        lambda: v.assign_add(tf.reduce_sum(i)),
        lambda: v.assign_add(tf.math.count_nonzero(p.mask())),
        lambda: v.assign(tf.reduce_max(i) + v),
        lambda: v.assign_add(tf.shape(p.given["x"], out_type=tf.int64)[0] * 3 + 1),
        lambda: (
            p.variables["step"].assign_add(p.n)
            if p.chance()
            else v.assign_sub(tf.reduce_max(i))
        ),
        lambda: tf.cond(p.n > 2, lambda: v.assign_add(1), lambda: v.assign_sub(i[0])),
    ]
    p.of(options)()
    return p.number(v.read_value() % 7) / 7, ()


def remembered(p: Builder) -> Made:
    """A memory of the last examples, of which a loss reads."""
    v, (a, dims) = p.variables["bank"], p.pick(lambda d: d == ("n", 3))
    x = calm(a if dims == ("n", 3) else p.given["x"])
    options: list[Any] = [
        lambda: v.assign(tf.concat([v.read_value(), x], 0)[-4:]),
        lambda: v.assign(tf.concat([x, v.read_value()], 0)[:4]),
        lambda: v.assign(tf.roll(v.read_value(), 1, 0) + tf.reduce_mean(x, 0)),
        lambda: v[p.n % 4].assign(x[0]),
        lambda: v.assign(
            0.9 * v + 0.1 * tf.math.unsorted_segment_mean(x, p.given["i"] % 4, 4)
        ),
        lambda: v.assign(tf.tanh(tf.matmul(x, x, transpose_a=True)[:1] + v)),
    ]
    before = v.read_value()
    p.of(options)()
    bank = p.of([lambda: v.read_value(), lambda: before])()
    return calm(tf.matmul(x, bank, transpose_b=True)), ("n", 4)


def scattered(p: Builder) -> Made:
    """Adds examples to rows of a variable, some of them twice."""
    v, i = p.variables["seen"], p.given["i"]
    y = tf.tanh(p.given["y"])
    some = p.mask()
    kept, places = tf.boolean_mask(y, some), tf.boolean_mask(i, some)
    options: list[Any] = [
        lambda: v.scatter_add(tf.IndexedSlices(y, i)),
        lambda: v.scatter_sub(tf.IndexedSlices(y, i)),
        lambda: v.scatter_max(tf.IndexedSlices(y, i)),
        lambda: v.scatter_min(tf.IndexedSlices(y, i)),
        lambda: v.scatter_nd_add(i[:, None], y),
        lambda: v.scatter_add(tf.IndexedSlices(kept, places)),
        lambda: v.scatter_update(tf.IndexedSlices(tf.ones_like(i[:1], v.dtype), i[:1])),
        lambda: v.assign_add(tf.math.unsorted_segment_sum(y, i, 7)),
        lambda: v.assign(tf.tensor_scatter_nd_add(v, i[:, None], y)),
        lambda: v.scatter_div(tf.IndexedSlices(tf.ones_like(y) * 2, i)),
        lambda: v.scatter_mul(tf.IndexedSlices(tf.ones_like(y) * 0.5, i)),
    ]
    p.of(options)()
    return calm(tf.gather(v, i)), ("n",)


def clustered(p: Builder) -> Made:
    """A codebook, as in VQ-VAE: the nearest rows, their counts, their averages."""
    v, x = p.variables["bank"], p.given["x"]
    squares = tf.reduce_sum((x[:, None] - v.read_value()) ** 2, -1)
    if not p.is_exact:
        squares = tf.one_hot(p.given["i"] % 4, 4, dtype=p.dtype)
    nearest = tf.argmin(rounded(squares), 1)
    hot = tf.one_hot(nearest, 4, dtype=p.dtype)
    sums = tf.matmul(hot, x, transpose_a=True)
    v.assign(0.9 * v + 0.1 * sums / (tf.reduce_sum(hot, 0)[:, None] + 0.1))
    code = tf.gather(v, nearest)
    return x + tf.stop_gradient(calm(code) - x), ("n", 3)


def powered(p: Builder) -> Made:
    """A spectral norm by power iteration, whose vector is kept."""
    v, w = p.variables["vector"], p.variables["w"]
    new = tf.math.l2_normalize(
        tf.linalg.matvec(w, tf.linalg.matvec(w, v), transpose_a=True), 0, 0.1
    )
    v.assign(tf.stop_gradient(new))
    sigma = tf.tensordot(
        tf.linalg.matvec(w, tf.stop_gradient(new)), tf.ones([3], p.dtype), 1
    )
    return calm(p.given["x"] @ w / (1 + sigma**2)), ("n", 4)


def measured(p: Builder) -> Made:
    """A metric: sums and counts that are added up, and their ratio."""
    v, total = p.variables["total"], p.pick()[0]
    options: list[Any] = [
        lambda: v.assign_add(tf.reduce_sum(tf.tanh(total))),
        lambda: v.assign_add(tf.reduce_mean(total)),
        lambda: v.assign(tf.maximum(v, tf.reduce_sum(tf.tanh(total)))),
        lambda: v.assign_add(tf.reduce_sum(p.number(p.mask())) / p.number(p.n)),
        lambda: v.assign(tf.math.reduce_variance(total)),
        lambda: v.assign_add(
            tf.while_loop(
                lambda k, s: k < 2,
                lambda k, s: (k + 1, s + tf.reduce_mean(total)),
                (0, v.read_value()),
            )[1]
        ),
    ]
    p.of(options)()
    return calm(finite(v.read_value()) / 4), ()


def in_loops(p: Builder) -> Made:
    """Writes within loops and branches."""
    v, x = p.variables["average"], p.given["x"]

    def turn(k: tf.Tensor) -> Any:
        v.assign(tf.tanh(0.5 * v + tf.reduce_mean(x, 0) * p.number(k)))
        return [k + 1]

    def descend(k: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(v)
            loss = tf.reduce_mean((tf.linalg.matvec(x, v) - p.given["y"]) ** 2)
        v.assign_sub(0.05 * tape.gradient(loss, v))
        return [k + 1]

    def flip() -> tf.Tensor:
        p.variables["is_on"].assign(tf.logical_not(p.variables["is_on"]))
        return tf.reduce_mean(x)

    options: list[Any] = [
        lambda: tf.while_loop(lambda k: k < 2, turn, [0]),
        lambda: tf.while_loop(lambda k: k < 2, descend, [0]),
        lambda: (
            tf.while_loop(
                lambda k: tf.logical_and(
                    k < 5, rounded(tf.reduce_sum(v**2)) < 1.0372513
                ),
                turn,
                [0],
            )
            if p.is_exact
            else flip()
        ),
        lambda: tf.cond(p.n > 3, flip, lambda: p.number(0)),
        lambda: tf.cond(
            tf.reduce_sum(p.given["y"]) > 0,
            flip,
            lambda: tf.reduce_sum(v.assign(v * 0.5)),
        ),
    ]
    p.of(options)()
    return calm(v.read_value()), (3,)


MAKERS = (
    average,
    average,
    counted,
    remembered,
    scattered,
    clustered,
    powered,
    measured,
    in_loops,
)
