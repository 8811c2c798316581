# SPDX-License-Identifier: Apache-2.0
"""Losses, also those across examples."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.forms.programs import values
from tests.forms.programs.values import Builder, Made, calm, rounded

v1 = tf.compat.v1


def _logits(p: Builder) -> tf.Tensor:
    """Returns logits [n, 3 or 4]."""
    a, dims = p.pick(lambda d: values.is_matrix(d) and d[1] in (3, 4))
    if not values.is_matrix(dims) or dims[1] not in (3, 4):
        a, dims = p.given["x"], ("n", 3)
    if a.shape.rank is None or a.shape[1] is None:
        a = tf.ensure_shape(a, [None, dims[1]])
    return (
        a
        if p.chance(0.3)
        else tf.tanh(a @ p.variables["w" if a.shape[1] == 3 else "u"])
    )


def of_each(p: Builder) -> Made:
    """A loss per example, by a classifier or a regression."""
    a, y = _logits(p), p.given["y"]
    classes: int = a.shape[1]
    labels = p.given["i"] % classes
    hot = tf.one_hot(labels, classes, dtype=p.dtype)
    smooth = 0.9 * hot + 0.1 / classes
    prediction = tf.reduce_mean(a, 1)
    options: list[Any] = [
        lambda: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, a),
        lambda: tf.nn.softmax_cross_entropy_with_logits(hot, a),
        lambda: tf.nn.softmax_cross_entropy_with_logits(smooth, a),
        lambda: tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(hot, a), 1),
        lambda: tf.reduce_mean(
            tf.nn.weighted_cross_entropy_with_logits(hot, a, 2.0), 1
        ),
        lambda: tf.keras.losses.sparse_categorical_crossentropy(
            labels, a, from_logits=True
        ),
        lambda: tf.keras.losses.categorical_crossentropy(hot, tf.nn.softmax(a)),
        lambda: tf.nn.relu(1.0137 - tf.sign(y) * prediction),
        lambda: tf.keras.losses.huber(y[:, None], a),
        lambda: tf.keras.losses.cosine_similarity(hot, a + 0.1),
        lambda: tf.reduce_sum(smooth * tf.math.log(smooth / tf.nn.softmax(a)), 1),
        lambda: tf.nn.log_poisson_loss(tf.abs(y), prediction),
        lambda: -tf.gather(tf.nn.log_softmax(a), labels, batch_dims=1),
        lambda: (
            -tf.reduce_sum(hot * (1 - tf.nn.softmax(a)) ** 2 * tf.nn.log_softmax(a), 1)
        ),
        lambda: tf.abs(y - prediction - 0.0137),
        lambda: (y - prediction) ** 2,
    ]
    return calm(p.number(p.of(options)()) / 2), ("n",)


def reduced(p: Builder) -> Made:
    """A loss of all examples that weighs, masks or divides."""
    each, _ = of_each(p)
    weights = tf.abs(p.given["y"])
    y, some = p.given["y"], p.number(p.mask())
    losses, kinds = v1.losses, v1.losses.Reduction
    classes = tf.cast(p.given["i"] % 3, tf.int32)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(y), classes, 3)
    options: list[Any] = [
        lambda: tf.reduce_sum(each * weights) / tf.reduce_sum(weights),
        lambda: tf.reduce_sum(each * some) / tf.maximum(tf.reduce_sum(some), 1),
        lambda: tf.reduce_mean(each / tf.gather(counts, classes)),
        lambda: tf.reduce_sum(each * tf.nn.softmax(y)),
        lambda: tf.reduce_mean(each) / tf.reduce_mean(some + 0.1),
        lambda: tf.reduce_mean(each) + tf.nn.l2_loss(p.variables["w"]),
        lambda: tf.sqrt(tf.reduce_sum(each * each) + 0.1),
        lambda: tf.reduce_mean(
            tf.sort(rounded(each) if p.is_exact else weights, direction="DESCENDING")[
                : p.n // 2 + 1
            ]
        ),
        lambda: tf.reduce_mean(
            tf.math.top_k(rounded(each) if p.is_exact else y, tf.minimum(p.n, 3)).values
        ),
        lambda: tf.reduce_mean(
            each
            * tf.stop_gradient(each)
            / (1 + tf.reduce_sum(tf.stop_gradient(each) ** 2))
        ),
        lambda: tf.reduce_logsumexp(each) - tf.math.log(p.number(p.n)),
    ]
    if not p.is_exact:  # these compute in float32
        options += [
            lambda: tf.nn.compute_average_loss(
                each, sample_weight=weights, global_batch_size=p.n
            ),
            lambda: losses.compute_weighted_loss(each, weights),
            lambda: losses.compute_weighted_loss(each, some, reduction=kinds.MEAN),
            lambda: losses.compute_weighted_loss(
                each, some, reduction=kinds.SUM_OVER_BATCH_SIZE
            ),
            lambda: losses.compute_weighted_loss(each, some, reduction=kinds.SUM),
            lambda: losses.mean_squared_error(tf.sin(y), each, some),
            lambda: losses.mean_pairwise_squared_error(
                p.given["x"], tf.tanh(p.given["x"] * each[:, None])
            ),
            lambda: tf.keras.losses.MeanSquaredError()(y, each),
            lambda: tf.keras.losses.Huber(reduction="sum")(
                y[:, None], each[:, None], weights
            ),
        ]
    return calm(p.number(p.of(options)())), ()


def _normal(p: Builder) -> tf.Tensor:
    return tf.math.l2_normalize(_logits(p) + 0.1, 1, 0.1)


def across(p: Builder) -> Made:
    """A loss of pairs or more of examples: contrastive, triplet, Gram matrices."""
    a, i, y, n = _normal(p), p.given["i"] % 3, p.given["y"], p.n
    b = tf.math.l2_normalize(tf.sin(a) + 0.1, 1, 0.1)
    products = tf.matmul(a, a, transpose_b=True)
    eye = tf.eye(n, dtype=p.dtype)
    same = p.number(tf.equal(i[:, None], i[None, :])) - eye
    squares = tf.reduce_sum((a[:, None] - a[None]) ** 2, -1)
    far = tf.reduce_sum((tf.reduce_sum(a, 1)[:, None] - y[None]) ** 2)

    def contrastive() -> tf.Tensor:
        both = tf.concat([a, b], 0)
        logits = 2 * tf.matmul(both, both, transpose_b=True) - 1e3 * tf.eye(
            2 * n, dtype=p.dtype
        )
        labels = tf.concat([tf.range(n) + n, tf.range(n)], 0)
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        )

    def clip() -> tf.Tensor:
        logits = 2 * tf.matmul(a, b, transpose_b=True)
        cross = tf.nn.sparse_softmax_cross_entropy_with_logits
        labels = tf.range(n)
        return tf.reduce_mean(
            cross(labels, logits) + cross(labels, tf.transpose(logits))
        )

    def triplet() -> tf.Tensor:
        different = 1 - same - eye
        margins = squares[:, :, None] - squares[:, None, :] + 0.3137
        valid = same[:, :, None] * different[:, None, :]
        return tf.reduce_sum(tf.nn.softplus(margins) * valid) / (
            tf.reduce_sum(valid) + 1e-3
        )

    def supervised() -> tf.Tensor:
        logs = products - tf.reduce_logsumexp(products - 1e3 * eye, 1, keepdims=True)
        return -tf.reduce_mean(
            tf.math.divide_no_nan(tf.reduce_sum(same * logs, 1), tf.reduce_sum(same, 1))
        )

    def twins() -> tf.Tensor:
        cross = tf.matmul(a, b, transpose_a=True) / p.number(n)
        return tf.reduce_sum((cross - tf.eye(a.shape[1], dtype=p.dtype)) ** 2)

    def covariance() -> tf.Tensor:
        centered = a - tf.reduce_mean(a, 0)
        found = tf.matmul(centered, centered, transpose_a=True) / tf.maximum(
            p.number(n - 1), 1
        )
        spread = tf.sqrt(tf.linalg.diag_part(found) + 0.1)
        return tf.reduce_sum(found**2) + tf.reduce_sum(tf.nn.relu(1.0137 - spread))

    def survival() -> tf.Tensor:
        risk = tf.reduce_sum(a, 1)
        order = tf.argsort(y, direction="DESCENDING", stable=True)
        sums = tf.math.cumulative_logsumexp(tf.gather(risk, order))
        return tf.reduce_mean(sums - tf.gather(risk, order))

    def ranks() -> tf.Tensor:
        score = tf.reduce_sum(a, 1)
        wins = p.number(y[:, None] > y[None])
        return tf.reduce_sum(wins * tf.nn.softplus(score[None] - score[:, None])) / (
            tf.reduce_sum(wins) + 1
        )

    def sinkhorn() -> tf.Tensor:
        q = tf.exp(tf.stop_gradient(a))
        for _ in range(2):
            q = q / tf.reduce_sum(q, 0, keepdims=True) / q.shape[1]
            q = q / tf.reduce_sum(q, 1, keepdims=True) / p.number(n)
        return -tf.reduce_sum(q * tf.nn.log_softmax(a))

    def kernel() -> tf.Tensor:
        z = p.given["z"]
        first = a[:, :3]

        def of(u, v):
            return tf.reduce_mean(
                tf.exp(-tf.reduce_sum((u[:, None] - v[None]) ** 2, -1))
            )

        return of(first, first) + of(z, z) - 2 * of(first, z)

    def dice() -> tf.Tensor:
        hot = tf.one_hot(i, a.shape[1], dtype=p.dtype)
        shares = tf.nn.softmax(a)
        both = 2 * tf.reduce_sum(shares * hot, 0) + 1
        return tf.reduce_mean(1 - both / (tf.reduce_sum(shares + hot, 0) + 1))

    def centers() -> tf.Tensor:
        means = tf.math.unsorted_segment_mean(a, i, 3)
        return tf.reduce_mean(tf.reduce_sum((a - tf.gather(means, i)) ** 2, 1))

    def correlation() -> tf.Tensor:
        score = tf.reduce_sum(a, 1)
        u, v = score - tf.reduce_mean(score), y - tf.reduce_mean(y)
        return -tf.reduce_sum(u * v) / tf.sqrt(
            (tf.reduce_sum(u * u) + 0.1) * (tf.reduce_sum(v * v) + 0.1)
        )

    def hardest():
        return (
            tf.reduce_mean(tf.reduce_max(rounded(squares) * same, 1))
            if p.is_exact
            else far / 10
        )

    options = [
        contrastive,
        clip,
        triplet,
        supervised,
        twins,
        covariance,
        survival,
        ranks,
    ]
    options += [sinkhorn, kernel, dice, centers, correlation, hardest]
    options += [
        lambda: tf.reduce_mean((tf.matmul(a, a, transpose_a=True) / 3) ** 2),
        lambda: far / 20,
    ]
    options += [
        lambda: tf.reduce_mean(products * same),
        lambda: tf.reduce_mean(squares),
    ]
    return calm(p.of(options)()), ()


def of_sequences(p: Builder) -> Made:
    """CTC, a chain of labels, noise-contrastive estimation."""
    t, lengths = p.given["t"], p.given["lengths"]
    logits = tf.tensordot(t, p.variables["w"], 1)

    def single(a):
        return tf.cast(a, tf.float32)

    labels = tf.stack([p.given["i"] % 3, (p.given["i"] + 1) % 3], 1)
    labels = tf.cast(labels, tf.int32)
    ones = tf.ones_like(lengths)
    tables = p.variables["table"], tf.reduce_sum(p.variables["table"], 1)
    shares = tf.ones([2], tf.float32) / 2
    sampled = (tf.constant([1, 5], tf.int64), tf.ones([p.n, 1]) / 2, shares)
    inner = tf.cast(p.given["i"], tf.int64)[:, None]

    def chain() -> tf.Tensor:
        steps = tf.transpose(logits, [1, 0, 2])
        move = tf.matmul(p.variables["u"], p.variables["w"])

        def turn(alpha: tf.Tensor, emission: tf.Tensor) -> tf.Tensor:
            return tf.reduce_logsumexp(alpha[:, :, None] + move, 1) + emission

        return tf.reduce_logsumexp(tf.scan(turn, steps[1:], steps[0])[-1], 1) / 4

    def words() -> tf.Tensor:
        mask = tf.sequence_mask(lengths, tf.shape(t)[1], p.dtype)
        targets = tf.cast(tf.argmax(rounded(t), -1), tf.int32)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
        return tf.reduce_sum(each * mask, 1) / tf.reduce_sum(mask)

    def ctc() -> tf.Tensor:
        return (
            p.number(
                tf.nn.ctc_loss(
                    labels,
                    single(logits),
                    ones,
                    lengths,
                    logits_time_major=False,
                    blank_index=3,
                )
            )
            / 5
        )

    def ctc_dense() -> tf.Tensor:
        found = v1.nn.ctc_loss_v2(
            labels,
            single(tf.transpose(logits, [1, 0, 2])),
            ones,
            lengths,
            blank_index=0,
        )
        return p.number(found) / 5

    def nce() -> tf.Tensor:
        weights, biases = map(single, tables)
        return (
            p.number(
                tf.nn.nce_loss(
                    weights,
                    biases,
                    inner,
                    single(p.given["x"]),
                    2,
                    7,
                    sampled_values=sampled,
                )
            )
            / 3
        )

    def sampled_softmax() -> tf.Tensor:
        weights, biases = map(single, tables)
        found = tf.nn.sampled_softmax_loss(
            weights,
            biases,
            inner,
            single(p.given["x"]),
            2,
            7,
            sampled_values=sampled,
            remove_accidental_hits=False,
        )
        return p.number(found) / 3

    options = (
        [chain, words]
        if p.is_exact
        else [chain, words, ctc, ctc_dense, nce, sampled_softmax]
    )
    return calm(p.of(options)()), ("n",)


MAKERS = (of_each, of_each, reduced, reduced, across, across, across, of_sequences)
