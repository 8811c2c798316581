# SPDX-License-Identifier: Apache-2.0
"""Functions of elements, reductions, normalization and linear algebra."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.forms.programs import values
from tests.forms.programs.values import Builder, Made, calm, finite, rounded

# Kinks are where no structured value lies.
UNARY: list[Any] = [
    *(tf.tanh, tf.sigmoid, tf.sin, tf.nn.softplus, tf.nn.softsign, tf.identity),
    *(tf.negative, tf.nn.swish, tf.nn.gelu, tf.math.erf, tf.atan, tf.zeros_like),
    *(tf.ones_like, tf.stop_gradient),
    lambda a: tf.abs(a - 0.0137),
    lambda a: tf.nn.relu(a - 0.0137),
    lambda a: tf.nn.elu(a - 0.0137),
    lambda a: tf.nn.leaky_relu(a - 0.0137, 0.2),
    lambda a: tf.clip_by_value(a, -0.4137, 0.6137),
    lambda a: 0.5 * a + 1,
    lambda a: tf.tanh(a) ** 2,
    lambda a: tf.sqrt(tf.abs(a - 0.0137) + 0.1),
    lambda a: tf.math.rsqrt(a * a + 0.5),
    lambda a: tf.exp(-a * a),
    lambda a: tf.math.log1p(a * a),
    lambda a: tf.math.lgamma(tf.nn.softplus(a) + 1),
    lambda a: tf.where(rounded(a) > 0.0137e-3, a, 0.1 * a),
    lambda a: tf.debugging.check_numerics(a, "a"),
    lambda a: tf.math.real(tf.complex(a, 2 * a) * tf.complex(a, a + 1)) / (1 + a * a),
    lambda a: a / (1 + tf.stop_gradient(a * a)),
]
BINARY: list[Any] = [
    *(tf.add, tf.subtract, tf.math.squared_difference),
    lambda a, b: tf.tanh(a) * b,
    lambda a, b: tf.maximum(a, b + 0.0137),
    lambda a, b: tf.minimum(a, b - 0.0137),
    lambda a, b: a / (1 + b * b),
    lambda a, b: tf.math.divide_no_nan(a, b * b + 0.5),
    lambda a, b: tf.pow(tf.nn.softplus(a) + 0.1, tf.tanh(b)),
    lambda a, b: tf.math.xlogy(tf.sigmoid(b), tf.sigmoid(a)),
    lambda a, b: tf.atan2(a, b * b + 1),
    lambda a, b: tf.add_n([a, tf.broadcast_to(b, tf.shape(a))]),
    lambda a, b: tf.where(tf.sigmoid(b) > 2.0, b, a),
    lambda a, b: tf.math.multiply_no_nan(a, tf.stop_gradient(tf.tanh(b))),
]
FOLDS: list[Any] = [
    *(tf.reduce_sum, tf.reduce_mean, tf.reduce_sum, tf.reduce_mean),
    tf.reduce_logsumexp,
    tf.math.reduce_variance,
    lambda a, k, keep: tf.reduce_prod(0.7 + 0.5 * tf.tanh(a), k, keep),
    lambda a, k, keep: tf.sqrt(tf.reduce_sum(a * a, k, keep) + 0.1),
    lambda a, k, keep: tf.sqrt(tf.math.reduce_variance(a, k, keep) + 0.05),
    lambda a, k, keep: tf.cast(tf.math.count_nonzero(rounded(a), k, keep), a.dtype),
]
ORDERED: list[Any] = [
    *(tf.reduce_max, tf.reduce_min),
    lambda a, k, keep: tf.reduce_max(a, k, keep) - tf.reduce_min(a, k, keep),
    lambda a, k, keep: tf.cast(tf.reduce_any(a > 0.7137, k, keep), a.dtype),
    lambda a, k, keep: tf.cast(tf.reduce_all(a > -0.7137, k, keep), a.dtype),
]


def of_one(p: Builder) -> Made:
    a, dims = p.pick()
    return p.of(UNARY)(a), dims


def of_two(p: Builder) -> Made:
    a, dims = p.pick()
    b, its = p.pick(lambda other: dims[max(len(dims) - len(other), 0) :] == other)
    if p.chance() or len(its) != len(dims):
        return p.of(BINARY)(a, b if len(its) <= len(dims) else a), dims
    return p.of(BINARY)(b, a), dims


def of_columns(p: Builder) -> Made | None:
    """Combines a number per row with rows, or all rows with all rows."""
    a, dims = p.pick(lambda dims: len(dims) > 1)
    b, _ = p.pick(lambda other: other == dims[:1])
    if b.shape.rank != 1:
        return None
    ones = [1] * (len(dims) - 1)
    column = tf.reshape(b, tf.concat([tf.shape(b), ones], 0))
    options: list[Any] = [
        lambda: (p.of(BINARY)(a, column + tf.zeros_like(a)), dims),
        lambda: (calm(a * column), dims),
        lambda: (a / (1 + column * column), dims),
        lambda: (p.of(BINARY)(b[:, None] + 0 * b, b), (dims[0], dims[0])),
        lambda: (calm(b[:, None] * b[None, :]), (dims[0], dims[0])),
        lambda: (
            tf.where((rounded(b) > 0.1)[:, None], b[:, None], 0.5 * b),
            (dims[0], dims[0]),
        ),
    ]
    return p.of(options)()


def folded(p: Builder) -> Made:
    """Reduces one axis, or two."""
    is_ordered = p.chance(0.35)
    a, dims, axis = p.decisive_axis() if is_ordered else p.axis_of()
    keep, axes = p.chance(0.3), {axis, int(p.rng.integers(len(dims)))}
    made = [1 if k in axes else d for k, d in enumerate(dims) if keep or k not in axes]
    fold = p.of(ORDERED if is_ordered else FOLDS)
    return calm(finite(fold(a, sorted(axes), keep))), made


def fully_folded(p: Builder) -> Made:
    a, dims = p.pick()
    weights = tf.sigmoid(a)
    options: list[Any] = [
        lambda: tf.reduce_sum(a * weights) / tf.reduce_sum(weights + 0.01),
        lambda: tf.reduce_mean(a),
        lambda: tf.reduce_sum(a),
        lambda: tf.sqrt(tf.reduce_mean(a * a) + 0.1),
        lambda: tf.norm(tf.tanh(a) + 1.5),
        lambda: tf.nn.l2_loss(a),
        lambda: tf.nn.zero_fraction(rounded(a)),
        lambda: p.number(tf.size(a)) / 10,
        lambda: tf.reduce_sum(a) / p.number(p.n),
        lambda: tf.reduce_sum(a) / tf.maximum(p.number(p.n) - 1.0, 1.0),
        lambda: tf.reduce_sum(a) / p.number(p.n) ** 2,
        lambda: tf.reduce_mean(a * a) - tf.reduce_mean(a) ** 2,
        lambda: tf.tensordot(a, a, len(dims)),
        lambda: tf.reduce_logsumexp(a),
        lambda: tf.linalg.global_norm([a, 0.3 * a + 1]),
        lambda: tf.math.reduce_euclidean_norm(tf.tanh(a) + 1.5),
    ]
    return calm(finite(p.of(options)())), ()


def masked(p: Builder) -> Made:
    """Reduces the examples that a mask keeps: none, on some replicas or on all."""
    a, dims = p.pick(values.has_rows)
    keep = p.mask()
    ones = p.number(keep)
    shape = tf.concat([[p.n], tf.ones([len(dims) - 1], tf.int32)], 0)
    wide = tf.reshape(ones, shape)
    kept = tf.boolean_mask(a, keep)
    options: list[Any] = [
        lambda: tf.reduce_sum(a * wide, 0) / (tf.reduce_sum(ones) + 1e-3),
        lambda: tf.math.divide_no_nan(tf.reduce_sum(a * wide, 0), tf.reduce_sum(ones)),
        lambda: tf.reduce_sum(a * wide, 0) / tf.maximum(tf.reduce_sum(ones), 1),
        lambda: finite(tf.reduce_mean(kept, 0)),
        lambda: tf.reduce_sum(kept, 0),
        lambda: (
            finite(tf.reduce_max(rounded(kept), 0))
            if p.is_exact
            else tf.reduce_sum(kept, 0)
        ),
        lambda: tf.nn.weighted_moments(a, [0], wide + 0.1)[1],
        lambda: tf.reduce_logsumexp(a + (1 - wide) * -9, 0),
        lambda: (
            tf.reduce_sum(
                tf.where(keep, tf.reduce_sum(a, list(range(1, len(dims)))), 0.0)
            )
            + tf.zeros_like(a[0])
        ),
    ]
    return calm(p.of(options)()), dims[1:]


def normalized(p: Builder) -> Made:
    """Normalizes along an axis, or over the batch."""
    a, dims, k = p.axis_of()

    def wide(fold):
        return fold(a, k, keepdims=True)

    options: list[Any] = [
        lambda: a - wide(tf.reduce_mean),
        lambda: (
            (a - wide(tf.reduce_mean))
            * tf.math.rsqrt(wide(tf.math.reduce_variance) + 0.1)
        ),
        lambda: tf.nn.softmax(a, k),
        lambda: tf.nn.log_softmax(a, k) / 3,
        lambda: tf.math.l2_normalize(a, k, 0.1),
        lambda: a / (1 + wide(tf.reduce_sum) ** 2),
        lambda: tf.exp(a - wide(tf.reduce_logsumexp)),
        lambda: tf.nn.batch_normalization(
            a, *tf.nn.moments(a, [k], keepdims=True), 0.1, None, 0.1
        ),
        lambda: tf.clip_by_norm(a + 0.1, 1.1),
        lambda: tf.clip_by_global_norm([a + 0.01, tf.tanh(a)], 1.1)[0][0],
        lambda: a / (tf.reduce_sum(tf.abs(a - 0.0137)) + 1),
    ]
    return calm(p.of(options)()), dims


def accumulated(p: Builder) -> Made:
    a, dims, k = p.axis_of()
    a = tf.tanh(a)
    options: list[Any] = [
        lambda: tf.cumsum(a, k, exclusive=p.chance(), reverse=p.chance()),
        lambda: tf.math.cumprod(0.8 + 0.3 * a, k, reverse=p.chance()),
        lambda: tf.math.cumulative_logsumexp(a, k),
        lambda: (
            tf.cumsum(a, k) / (1 + tf.reduce_sum(tf.ones_like(a), k, keepdims=True))
        ),
    ]
    return calm(p.of(options)()), dims


def layer(p: Builder) -> Made:
    """Multiplies by a variable."""
    a, dims = p.pick(lambda dims: len(dims) > 1 and dims[-1] in (3, 4))
    w, last = ("w", 4) if dims[-1] == 3 else ("u", 3)
    kernel = p.variables[w]
    options: list[Any] = [
        lambda: tf.einsum("...k,km->...m", a, kernel),
        lambda: tf.tensordot(a, kernel, 1),
        lambda: (
            tf.matmul(a, kernel[None] if len(dims) == 3 else kernel)
            if len(dims) < 4
            else tf.tensordot(a, kernel, [[3], [0]])
        ),
    ]
    if len(dims) == 2:
        options += [
            lambda: a @ kernel,
            lambda: tf.matmul(a, tf.transpose(kernel), False, True),
        ]
    if len(dims) == 3 and dims[0] in ("n", "k"):
        options += [lambda: tf.nn.conv1d(a, kernel[None] + 0.0, 1, "SAME")]
    if p.is_mixed:

        def half(v):
            return tf.cast(v, tf.float16)

        options = [lambda: p.number(tf.tensordot(half(a), half(kernel), 1))]
    made = p.of(options)()
    if last == 4 and p.chance(0.7):
        made = (
            tf.nn.bias_add(made, p.variables["b"])
            if p.chance()
            else made + p.variables["b"]
        )
    if last == 3 and p.chance():
        made = made * p.variables["scale"]
    return tf.tanh(made), [*dims[:-1], last]


def product(p: Builder) -> Made:
    """Multiplies values: Gram matrices, distances, outer products."""
    (a, (*before, m, q)), flip = p.pick(lambda dims: len(dims) > 1), p.chance()

    def square():
        return tf.reduce_sum(a * a, -1)

    options: list[Any] = [
        lambda: (tf.tanh(a[..., :, None] - a[..., None, :]), [*before, m, q, q]),
        lambda: (tf.einsum("...ab,...cb->...ca", a, tf.sin(a)), [*before, m, m]),
        lambda: (tf.einsum("...ab,...ac->...bc", a, tf.sin(a)), [*before, q, q]),
        lambda: (
            tf.matmul(a, a, transpose_a=flip, transpose_b=not flip),
            [*before, *([q, q] if flip else [m, m])],
        ),
        lambda: (
            square()[..., :, None]
            + square()[..., None, :]
            - 2 * tf.matmul(a, a, transpose_b=True),
            [*before, m, m],
        ),
        lambda: (tf.linalg.diag_part(tf.matmul(a, a, transpose_b=True)), [*before, m]),
        lambda: (
            tf.linalg.band_part(tf.matmul(a, tf.cos(a), transpose_b=True), 0, -1),
            [*before, m, m],
        ),
        lambda: (tf.linalg.matvec(a, tf.reduce_mean(a, -2)), [*before, m]),
    ]
    made, dims = p.of(options)()
    return calm(0.3 * made), dims


def with_second(p: Builder) -> Made:
    """Combines the examples with those of another batch."""
    (a, dims), (z, other) = p.pick(values.is_matrix), p.pick(lambda d: d == ("k", 3))
    if other != ("k", 3) or dims[-1] not in (3,):
        a, dims, z = p.given["x"], ("n", 3), p.given["z"]
    options: list[Any] = [
        lambda: (calm(tf.matmul(a, z, transpose_b=True)), ("n", "k")),
        lambda: (tf.exp(-tf.reduce_sum((a[:, None] - z[None]) ** 2, -1)), ("n", "k")),
        lambda: (a - tf.reduce_mean(z, 0), dims),
        lambda: (tf.nn.softmax(tf.matmul(a, z, transpose_b=True)) @ z, dims),
        lambda: (tf.concat([a, z], 0), ("n+k", 3)),
        lambda: (calm(a * (tf.reduce_mean(a) - tf.reduce_mean(z))), dims),
        lambda: (tf.einsum("ni,kj->ij", a, z) / 10, (3, 3)),
    ]
    return p.of(options)()


def solved(p: Builder) -> Made:
    """Uses the linear algebra of small matrices, most of which has no rule."""
    a, dims = p.pick(lambda d: len(d) > 1 and d[-1] in (3, 4))
    size = int(dims[-1])
    square = tf.matmul(tf.tanh(a), tf.tanh(a), transpose_a=True) + tf.eye(
        size, dtype=p.dtype
    )
    options: list[Any] = [
        lambda: (tf.linalg.inv(square), [*dims[:-2], size, size]),
        lambda: (tf.linalg.cholesky(square) / 3, [*dims[:-2], size, size]),
        lambda: (
            tf.linalg.solve(square, tf.linalg.matrix_transpose(a)),
            [*dims[:-2], size, dims[-2]],
        ),
        lambda: (tf.math.log(tf.linalg.det(square) + 1) / 3, dims[:-2]),
        lambda: (tf.linalg.trace(square) / 10, dims[:-2]),
        lambda: (tf.linalg.logdet(square) / 3, dims[:-2]),
    ]
    made, found = p.of(options)()
    return calm(made), found


MAKERS = (
    *(of_one, of_two, of_columns, folded, folded, fully_folded, masked, masked),
    *(normalized, accumulated, layer, layer, product, with_second, solved),
)
