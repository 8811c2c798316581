# SPDX-License-Identifier: Apache-2.0
"""Small single-device programs, each with one kind of computation on the examples.

Losses use examples x [n, 3], y [n] and i [n], integers, and variables w [3, 2] and
b [2]; fetches use the examples; writes use variables v and n and the examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def count(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


def rows(x, y, w):
    return 0.3 * tf.reduce_sum(tf.square(tf.matmul(x, w)), 1) + y


def hidden(x, w, b):
    return tf.tanh(tf.matmul(x, w) + b)


def derived(target: tf.Tensor, by: Any) -> Any:
    (gradient,) = tf.gradients(target, [by])
    return gradient


@tf.custom_gradient
def clipped(z):
    return tf.identity(z), lambda d: tf.clip_by_value(d, -0.1, 0.1)


@tf.function
def of_a_function(x, w):
    return tf.reduce_mean(tf.reduce_sum(tf.tanh(tf.matmul(x, w)), 1))


@tf.custom_gradient
def divided(total, by):
    return total / by, lambda d: (d * (1.0 / by), None)


@tf.custom_gradient
def over_its_norm(z):
    return tf.identity(z), lambda d: d / (tf.norm(d) + 1e-3)


@tf.function
def masked(x, y, w):
    return tf.reduce_sum(rows(x, y, w) * _positive(y)) / tf.reduce_sum(_positive(y))


def _stepped(x, w):
    return w - 0.1 * derived(tf.reduce_mean(tf.tanh(x @ w) ** 2), w)


def descended(x, w, by):
    """Returns weights after a step on half of what they predict, by a tape."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = tf.reduce_mean((x @ w) ** 2) + tf.reduce_sum(by(x @ w))
    return w - 0.1 * tape.gradient(loss, w)


def _tape_hessian(x, y, i, w, b):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(hidden(x, w, b) ** 2)
    return tf.reduce_sum(tape.gradient(loss, w) * tf.constant([1.0, 2.0]))


def _tape_weighted(x, y, i, w, b):
    weights = tf.abs(y)[:, None]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights * tf.tanh(x @ w) ** 2) / tf.reduce_sum(weights)
    squares = tf.reduce_sum(tape.gradient(loss, w) ** 2)
    return squares + tf.reduce_sum(weights * (x @ w)) / tf.reduce_sum(weights)


def _tape_penalty(x, y, i, w, b):
    with tf.GradientTape() as tape:
        tape.watch(x)
        critic = tf.reduce_sum(hidden(x, w, b), 1)
    return tf.reduce_mean((tf.norm(tape.gradient(critic, x), axis=1) - 1) ** 2)


def _tape_third(x, y, i, w, b):
    with tf.GradientTape() as outer:
        squares = _tape_weighted(x, y, i, w, b)
    return tf.reduce_sum(outer.gradient(squares, w) ** 2)


def _supervised_contrastive(x, y, i, w, b):
    z = tf.math.l2_normalize(x @ w + b, 1)
    similar, itself = z @ tf.transpose(z) / 0.5, tf.eye(tf.shape(x)[0])
    positive = tf.cast(tf.equal(i[:, None] % 3, i % 3), tf.float32) - itself
    others = tf.reduce_logsumexp(similar - 1e9 * itself, 1, keepdims=True)
    pairs = tf.maximum(tf.reduce_sum(positive, 1), 1.0)
    return -tf.reduce_mean(tf.reduce_sum(positive * (similar - others), 1) / pairs)


def _triplets(x, y, i, w, b):
    z = x @ w
    distances = tf.reduce_sum((z[:, None] - z[None]) ** 2, -1)
    same = tf.cast(tf.equal(i[:, None] % 3, i % 3), tf.float32)
    farthest = tf.reduce_max(distances * same, 1)
    nearest = tf.reduce_min(distances + 1e3 * same, 1)
    return tf.reduce_mean(tf.nn.relu(farthest - nearest + 1.0))


def _focal(x, y, i, w, b):
    p = tf.gather(tf.nn.softmax(x @ w + b), i % 2, batch_dims=1)
    losses = -((1 - p) ** 2) * tf.math.log(p + 1e-6) * _positive(y)
    return tf.reduce_sum(losses) / (tf.reduce_sum(_positive(y)) + 1.0)


def _by_frequency(x, y, i, w, b):
    _, places, counts = tf.unique_with_counts(i % 3)
    often = tf.cast(tf.gather(counts, places), tf.float32)
    return tf.reduce_mean((x @ w) * often[:, None] ** 2)


def _recurrent(x, y, i, w, b):
    def cell(h: tf.Tensor, t: tf.Tensor) -> tf.Tensor:
        return tf.tanh(t[:, None] * b + h @ w[:2] * 0.1)

    states = tf.scan(cell, tf.transpose(x), tf.zeros([tf.shape(x)[0], 2]))
    return tf.reduce_mean(states[-1] ** 2) + tf.reduce_max(states)


def normalized(x):
    return (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 0.1)


def _looped(make: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.while_loop(lambda k, t: k < 3, lambda k, t: (k + 1, t + make()), (0, 0.0))


def _centered_by_python(x):
    return tf.numpy_function(lambda a: a - a.mean(0), [x], tf.float32)


def _positive(y):
    return tf.cast(y > 0, tf.float32)


def _times(x):  # [n, 4, 3]
    return tf.tile(x[:, None, :], [1, 4, 1])


def _masked_turns(x, lengths, w, b):
    def turn(k, h):
        new = tf.tanh(h + tf.matmul(x, w) + b)
        return k + 1, tf.where((k < lengths)[:, None], new, h)

    return tf.while_loop(lambda k, h: k < 3, turn, [0, tf.zeros_like(x[:, :2])])[1]


# Whose gradients equal one device's.
LOSSES: dict[str, Any] = {
    "rows": lambda x, y, i, w, b: rows(x, y, w),
    "rows over n": lambda x, y, i, w, b: tf.reduce_sum(rows(x, y, w) / count(x)),
    "rows times 1 / n": lambda x, y, i, w, b: tf.reduce_sum(
        rows(x, y, w) * (1 / count(x))
    ),
    "of Keras": lambda x, y, i, w, b: tf.keras.losses.MeanSquaredError()(
        tf.ones([1, 2]), hidden(x, w, b)
    ),
    "a sum of Keras": lambda x, y, i, w, b: tf.keras.losses.MeanSquaredError("sum")(
        tf.zeros_like(x[:, :2]), hidden(x, w, b)
    ),
    "an average of 7": lambda x, y, i, w, b: tf.nn.compute_average_loss(
        rows(x, y, w), None, 7
    ),
    "L2": lambda x, y, i, w, b: tf.nn.l2_loss(hidden(x, w, b)),
    "a list": lambda x, y, i, w, b: [tf.reduce_mean(rows(x, y, w)), tf.nn.l2_loss(w)],
    "a sum and a mean": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w)) + tf.reduce_mean(rows(x, y, w))
    ),
    "only variables": lambda x, y, i, w, b: tf.nn.l2_loss(w),
    "times a mean by Python": lambda x, y, i, w, b: tf.reduce_mean(
        rows(x, y, w) * tf.ensure_shape(tf.numpy_function(np.mean, [y], tf.float32), [])
    ),
    "focal and masked": _focal,
    "mean": lambda x, y, i, w, b: tf.reduce_mean(rows(x, y, w)),
    "regularized": lambda x, y, i, w, b: (
        tf.reduce_mean(rows(x, y, w)) + tf.nn.l2_loss(w) + tf.reduce_sum(tf.abs(b))
    ),
    "sum": lambda x, y, i, w, b: tf.reduce_sum(rows(x, y, w)),
    "two": lambda x, y, i, w, b: (
        tf.reduce_mean(rows(x, y, w)) + 0.5 * tf.reduce_mean(hidden(x, w, b))
    ),
    "stopped": lambda x, y, i, w, b: tf.reduce_mean(
        tf.square(hidden(x, w, b) - tf.stop_gradient(hidden(x, w, b)) + y[:, None])
    ),
    "custom gradient": lambda x, y, i, w, b: tf.reduce_mean(
        clipped(hidden(x, w, b)) ** 2
    ),
    "custom gradient of a sum": lambda x, y, i, w, b: clipped(
        tf.reduce_sum(hidden(x, w, b) ** 2)
    ),
    "over a root of n": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w)) / tf.sqrt(count(x))
    ),
    "times n": lambda x, y, i, w, b: tf.reduce_mean(rows(x, y, w)) * count(x),
    "over n squared": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w)) / count(x) ** 2
    ),
    "over n + 1": lambda x, y, i, w, b: tf.reduce_sum(rows(x, y, w)) / (count(x) + 1),
    "weighted": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w) * tf.abs(y)) / tf.reduce_sum(tf.abs(y))
    ),
    # A replica may have to divide by 0 where one device does not.
    "over n - 1": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w)) / (count(x) - 1.0) + tf.nn.l2_loss(w)
    ),
    "over n - 1, or nothing": lambda x, y, i, w, b: tf.math.divide_no_nan(
        tf.reduce_sum(rows(x, y, w)), count(x) - 1.0
    ),
    "all, over some": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w)) / tf.reduce_sum(_positive(y))
    ),
    "each, over some": lambda x, y, i, w, b: tf.reduce_sum(
        rows(x, y, w) / tf.reduce_sum(_positive(y))
    ),
    "signed weights": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w) * tf.sign(y + 0.1))
        / (tf.reduce_sum(tf.sign(y)) + 0.5 * tf.reduce_sum(_positive(y)))
    ),
    "two masked means": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w) * _positive(y)) / tf.reduce_sum(_positive(y))
        + tf.reduce_sum(rows(x, y, w) * _positive(-y)) / tf.reduce_sum(_positive(-y))
    ),
    "masked means of columns": lambda x, y, i, w, b: tf.reduce_sum(
        tf.reduce_sum(hidden(x, w, b) * _positive(x[:, :2]), 0)
        / (tf.reduce_sum(_positive(x[:, :2]), 0) + 0.1)
    ),
    "normalized examples": lambda x, y, i, w, b: tf.reduce_mean(
        rows(normalized(x), y, w) * normalized(y)
    ),
    "over the largest": lambda x, y, i, w, b: tf.reduce_mean(
        rows(x / tf.reduce_max(tf.abs(x)), y, w)
    ),
    "clipped by a deviation": lambda x, y, i, w, b: tf.reduce_mean(
        tf.clip_by_value(rows(x, y, w), -tf.math.reduce_std(y), tf.reduce_max(y))
    ),
    "times a deviation": lambda x, y, i, w, b: (
        tf.reduce_mean(rows(x, y, w)) * tf.math.reduce_std(y) + tf.reduce_max(y)
    ),
    "weighted by classes": lambda x, y, i, w, b: tf.reduce_mean(
        rows(x, y, w)
        * tf.gather(
            1.0 / (tf.math.unsorted_segment_sum(tf.abs(y), i % 3, 3) + 1.0), i % 3
        )
    ),
    "times a branch by examples": lambda x, y, i, w, b: tf.reduce_mean(
        rows(x, y, w) * tf.cond(tf.reduce_sum(y) > 0.3, lambda: 1.0, lambda: 2.0)
    ),
    "softmax of weights": lambda x, y, i, w, b: tf.reduce_sum(
        rows(x, y, w) * tf.exp(y) / tf.reduce_sum(tf.exp(y))
    ),
    "norm of the gradient of a masked mean": lambda x, y, i, w, b: (
        tf.reduce_mean(rows(x, y, w)) / tf.reduce_mean(_positive(y))
        + tf.reduce_sum(
            derived(
                tf.reduce_sum(hidden(x, w, b) ** 2) / tf.reduce_sum(_positive(y)), w
            )
            ** 2
        )
    ),
    "masked, at least one": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w) * _positive(y))
        / tf.maximum(tf.reduce_sum(_positive(y)), 1.0)
    ),
    "masked, and a bit": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w) * _positive(y))
        / (tf.reduce_sum(_positive(y)) + 1e-3)
    ),
    "mean of some": lambda x, y, i, w, b: tf.reduce_mean(
        tf.boolean_mask(rows(x, y, w), y > -0.5)
    ),
    "sum of some": lambda x, y, i, w, b: tf.reduce_sum(
        tf.boolean_mask(rows(x, y, w), y > 0)
    ),
    "over time": lambda x, y, i, w, b: tf.reduce_mean(
        tf.reduce_sum(tf.matmul(_times(x), w), 1) ** 2
    ),
    "time first": lambda x, y, i, w, b: tf.reduce_mean(
        tf.reduce_sum(tf.transpose(_times(x), [1, 0, 2]) @ w, 2) ** 2
    ),
    "time first, merged": lambda x, y, i, w, b: tf.reduce_mean(
        tf.reshape(tf.transpose(_times(x), [1, 0, 2]), [-1, 3]) @ w
    ),
    "merged": lambda x, y, i, w, b: tf.reduce_mean(
        tf.reshape(hidden(x, w, b), [-1]) ** 2
    ),
    "transposed": lambda x, y, i, w, b: tf.reduce_mean(
        tf.matmul(w, x, transpose_a=True, transpose_b=True) ** 2
    ),
    "a branch": lambda x, y, i, w, b: tf.cond(
        tf.reduce_sum(w) > 0,
        lambda: tf.reduce_mean(rows(x, y, w)),
        lambda: 2 * tf.reduce_mean(rows(x, y, w)),
    ),
    "a loop": lambda x, y, i, w, b: _looped(lambda: tf.reduce_mean(rows(x, y, w)))[1],
    "a function": lambda x, y, i, w, b: of_a_function(x, w),
    "covariances": lambda x, y, i, w, b: tf.reduce_sum(
        tf.matmul(hidden(x, w, b), x, transpose_a=True) / count(x)
    ),
    "einsum": lambda x, y, i, w, b: tf.reduce_mean(tf.einsum("nd,dk->nk", x, w) ** 2),
    "one behind the other": lambda x, y, i, w, b: tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(
            labels=tf.concat([tf.ones(tf.shape(x)[:1]), tf.zeros(tf.shape(x)[:1])], 0),
            logits=hidden(tf.concat([x, 2.0 * x], 0), w, b)[:, 0],
        )
    ),
    "and apart again": lambda x, y, i, w, b: tf.add_n(
        [
            tf.reduce_mean(part)
            for part in tf.split(hidden(tf.concat([x, 2.0 * x], 0), w, b) ** 2, 2)
        ]
    ),
    "cross entropy": lambda x, y, i, w, b: tf.reduce_mean(
        tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(i % 2, 2), x @ w)
    ),
    "looked up": lambda x, y, i, w, b: tf.reduce_mean(tf.gather(w, i % 3)[:, 0] * y),
    "chosen of each": lambda x, y, i, w, b: tf.reduce_mean(
        tf.gather_nd(hidden(x, w, b), tf.stack([tf.range(tf.shape(i)[0]), i % 2], 1))
        * y
    ),
    "convolved": lambda x, y, i, w, b: tf.reduce_mean(
        tf.nn.conv1d(x[:, :, None], tf.reshape(w, [3, 1, 2]), 1, "SAME") ** 2
    ),
    "the longest of rows": lambda x, y, i, w, b: tf.reduce_mean(
        tf.norm(hidden(x, w, b), axis=1) + tf.reduce_max(hidden(x, w, b), 1)
    ),
    "by segments": lambda x, y, i, w, b: tf.reduce_sum(
        tf.math.unsorted_segment_sum(hidden(x, w, b), i % 3, 3) * 0.5
    ),
    "repeated": lambda x, y, i, w, b: tf.reduce_mean(
        tf.repeat(hidden(x, w, b), 2, 0) ** 2
    ),
    # Of three axes, and by rows in other ways.
    "tensordot": lambda x, y, i, w, b: tf.reduce_mean(
        tf.tensordot(_times(x) * y[:, None, None], w, [[2], [0]]) ** 2
    ),
    "flat, and back": lambda x, y, i, w, b: tf.reduce_mean(
        tf.reduce_sum(
            tf.reshape(hidden(tf.reshape(_times(x), [-1, 3]), w, b), [-1, 4, 2]), 1
        )
        ** 2
    ),
    "cross entropy of words": lambda x, y, i, w, b: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=tf.stack([i % 2] * 4, 1), logits=tf.tensordot(_times(x), w, 1)
        )
    ),
    "weights of TensorFlow 1": lambda x, y, i, w, b: (
        tf.compat.v1.losses.mean_squared_error(
            x[:, :2], hidden(x, w, b), weights=tf.nn.relu(y)[:, None]
        )
    ),
    "masked turns": lambda x, y, i, w, b: tf.reduce_mean(
        _masked_turns(x, i % 4, w, b) ** 2
    ),
    # Gradients of gradients.
    "penalty": lambda x, y, i, w, b: (
        tf.reduce_mean(hidden(x, w, b))
        + tf.reduce_mean(
            (tf.norm(derived(hidden(x, w, b)[:, 0], x), axis=1) - 1.0) ** 2
        )
    ),
    "Hessian times a vector": lambda x, y, i, w, b: tf.reduce_sum(
        derived(tf.reduce_mean(hidden(x, w, b) ** 2), w) * tf.ones([3, 2])
    ),
    "norm of a gradient": lambda x, y, i, w, b: (
        tf.reduce_mean(rows(x, y, w))
        + tf.reduce_sum(derived(tf.reduce_sum(hidden(x, w, b) ** 2), w) ** 2)
        + tf.nn.l2_loss(w)
    ),
    "an inner step": lambda x, y, i, w, b: tf.reduce_mean(
        rows(0.5 * x, y, w - 0.1 * derived(tf.reduce_mean(hidden(x, w, b) ** 2), w))
    ),
    "an inner step, weighted": lambda x, y, i, w, b: (
        tf.reduce_sum(
            tf.abs(y)
            * rows(0.5 * x, y, w - 0.1 * derived(tf.reduce_sum(rows(x, y, w)), w))
        )
        / tf.reduce_sum(tf.abs(y))
    ),
    "Hessian by tapes": _tape_hessian,
    "weighted, by tapes": _tape_weighted,
    "penalty by tapes": _tape_penalty,
    "a third gradient by tapes": _tape_third,
    "an inner step by tapes": lambda x, y, i, w, b: tf.reduce_mean(
        rows(x, y, descended(0.5 * x, w, tf.tanh))
    ),
    "a third gradient": lambda x, y, i, w, b: tf.reduce_sum(
        derived(tf.reduce_sum(derived(tf.reduce_mean(hidden(x, w, b) ** 2), w) ** 2), w)
        * 0.1
    ),
}
# Of which nothing but sums is sent, and how many: of gradients, and before them.
SPLIT = {
    "tensordot": 1,
    "flat, and back": 1,
    "cross entropy of words": 1,
    "weights of TensorFlow 1": 2,
    "masked turns": 1,
}
# No weight makes these right: each replica computes the whole batch.
WHOLE: dict[str, Any] = {
    "a maximum": lambda x, y, i, w, b: tf.reduce_max(rows(x, y, w)),
    "all but the first": lambda x, y, i, w, b: tf.reduce_mean(rows(x, y, w)[1:]),
    "rows over their sum": lambda x, y, i, w, b: tf.reduce_sum(
        rows(x, y, w) / tf.reduce_sum(rows(x, y, w))
    ),
    "two steps by tapes": lambda x, y, i, w, b: tf.reduce_mean(
        rows(x, y, descended(x, descended(x, w, tf.square), tf.sin))
    ),
    "the hardest half": lambda x, y, i, w, b: tf.reduce_mean(
        tf.math.top_k(rows(x, y, w), tf.maximum(tf.shape(x)[0] // 2, 1)).values
    ),
    "supervised and contrastive": _supervised_contrastive,
    "triplets": _triplets,
    "by frequency": _by_frequency,
    "recurrent": _recurrent,
    "ranks": lambda x, y, i, w, b: tf.reduce_mean(
        rows(x, y, w) * tf.cast(tf.argsort(tf.argsort(rows(x, y, w))), tf.float32)
    ),
    "order statistics": lambda x, y, i, w, b: (
        tf.reduce_mean(tf.sort(x @ w, 0)[tf.shape(x)[0] // 2] ** 2)
        + tf.math.reduce_std(x @ w)
        + tf.reduce_mean(tf.math.cumsum(x @ w, 0))
    ),
    "about their centers": lambda x, y, i, w, b: tf.reduce_sum(
        (x @ w - tf.gather(tf.math.unsorted_segment_mean(x @ w, i % 3, 3), i % 3)) ** 2
    ),
    "less a mean by Python": lambda x, y, i, w, b: tf.reduce_mean(
        (tf.ensure_shape(_centered_by_python(x), x.shape) @ w) ** 2
    ),
    "a root": lambda x, y, i, w, b: tf.sqrt(tf.reduce_mean(rows(x, y, w) ** 2)),
    "a norm": lambda x, y, i, w, b: tf.norm(rows(x, y, w)),
    "a trained ratio": lambda x, y, i, w, b: (
        tf.reduce_sum(rows(x, y, w)) / tf.reduce_sum(rows(x, y, w) ** 2)
    ),
    "products of examples": lambda x, y, i, w, b: tf.reduce_mean(
        tf.matmul(hidden(x, w, b), hidden(x, w, b), transpose_b=True) ** 2
    ),
    "contrasted": lambda x, y, i, w, b: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=tf.range(tf.shape(x)[0]),
            logits=tf.einsum("nd,md->nm", hidden(x, w, b), hidden(2 * x, w, b)),
        )
    ),
    "pairs": lambda x, y, i, w, b: tf.reduce_mean(
        (rows(x, y, w)[:, None] - rows(x, y, w)[None, :]) ** 2
    ),
    "broadcast by mistake": lambda x, y, i, w, b: tf.reduce_mean(
        (tf.matmul(x, w)[:, :1] - y) ** 2
    ),
    "softmax over the batch": lambda x, y, i, w, b: tf.reduce_sum(
        tf.nn.softmax(rows(x, y, w)) * y
    ),
    "softmax over axis 0": lambda x, y, i, w, b: tf.reduce_sum(
        tf.nn.softmax(hidden(x, w, b), axis=0) * y[:, None]
    ),
    "sorted": lambda x, y, i, w, b: tf.reduce_mean(tf.sort(rows(x, y, w)) * y),
    "summed up": lambda x, y, i, w, b: tf.reduce_mean(tf.cumsum(rows(x, y, w)) ** 2),
    "reversed": lambda x, y, i, w, b: tf.reduce_mean(rows(x, y, w) * y[::-1]),
    "rolled": lambda x, y, i, w, b: tf.reduce_mean(rows(x, y, w) * tf.roll(y, 1, 0)),
    "the first": lambda x, y, i, w, b: rows(x, y, w)[0],
    "differences": lambda x, y, i, w, b: tf.reduce_sum(
        (rows(x, y, w)[1:] - rows(x, y, w)[:-1]) ** 2
    ),
    "a constant behind": lambda x, y, i, w, b: tf.reduce_sum(
        tf.concat([x, tf.ones([2, 3])], 0) @ w
    ),
    "padded": lambda x, y, i, w, b: tf.reduce_mean(
        tf.pad(hidden(x, w, b), [[1, 0], [0, 0]]) ** 2
    ),
    "others looked up": lambda x, y, i, w, b: tf.reduce_mean(
        tf.gather(hidden(x, w, b)[:, 0], i % tf.shape(x)[0]) * y
    ),
    "split among others": lambda x, y, i, w, b: tf.reduce_mean(
        tf.reduce_max(tf.reshape(tf.tile(x, [2, 1]) @ w, [2, -1]), 0)
    ),
    "a branch by examples": lambda x, y, i, w, b: tf.reduce_mean(
        tf.cond(
            tf.reduce_sum(y) > 0, lambda: rows(x, y, w), lambda: 2.0 * rows(x, y, w)
        )
    ),
    "as many turns as examples ask for": lambda x, y, i, w, b: tf.reduce_mean(
        tf.while_loop(
            lambda t: tf.reduce_max(t) < 30.0,
            lambda t: [1.7 * t + 1.0],
            [rows(x, y, w)],
        )[0]
    ),
    "scanned": lambda x, y, i, w, b: tf.reduce_mean(
        tf.scan(lambda a, r: 0.5 * a + tf.reduce_sum(r @ w), x[:, None], 0.0)
    ),
    "divided behind a gradient of its own": lambda x, y, i, w, b: divided(
        tf.reduce_sum(rows(x, y, w)), count(x) + 0.5
    ),
    "over a norm behind a gradient of its own": lambda x, y, i, w, b: tf.reduce_mean(
        over_its_norm(hidden(x, w, b)) ** 2
    ),
    "weights over a norm behind theirs": lambda x, y, i, w, b: tf.reduce_mean(
        hidden(x, over_its_norm(w), b) ** 2
    ),
    "computed anew for gradients": lambda x, y, i, w, b: tf.reduce_mean(
        tf.recompute_grad(lambda z: hidden(z, w, b))(x) ** 2
    ),
    "a masked mean in a function": lambda x, y, i, w, b: masked(x, y, w),
    "a masked mean in a branch": lambda x, y, i, w, b: tf.cond(
        tf.reduce_sum(w) > 0, lambda: masked(x, y, w), lambda: 0.0
    ),
    "example by example": lambda x, y, i, w, b: tf.reduce_mean(
        tf.map_fn(lambda one: tf.norm(hidden(one[None], w, b)), x)
    ),
    "examples in one": lambda x, y, i, w, b: tf.reduce_mean(
        tf.vectorized_map(lambda one: tf.norm(hidden(one[None], w, b)), x)
    ),
    "two inner steps": lambda x, y, i, w, b: tf.reduce_mean(
        rows(x, y, _stepped(x, _stepped(x, w)))
    ),
    "squares of sums": lambda x, y, i, w, b: tf.reduce_sum(
        tf.math.unsorted_segment_sum(hidden(x, w, b), i % 3, 3) ** 2
    ),
}


def _f1(found, right):
    found, right = tf.cast(found, tf.float32), tf.cast(right, tf.float32)
    both = tf.reduce_sum(found * right)
    precision, recall = both / tf.reduce_sum(found), both / tf.reduce_sum(right)
    return 2 * precision * recall / (precision + recall + 1e-7)


FETCHES: dict[str, Any] = {
    "doubled": lambda x, y, i: x * 2,
    "mean": lambda x, y, i: tf.reduce_mean(x),
    "means": lambda x, y, i: tf.reduce_mean(x, 0),
    "sums": lambda x, y, i: tf.reduce_sum(x, 0),
    "of two sums": lambda x, y, i: tf.reduce_sum(x) / 2.0 - tf.reduce_sum(x * x),
    "maximum": lambda x, y, i: tf.reduce_max(x) + 0.0 * tf.ones([]),
    "less maxima": lambda x, y, i: -tf.reduce_max(x, 0),
    "minimum": lambda x, y, i: -tf.reduce_max(-tf.reduce_min(x, 1)),
    "all": lambda x, y, i: tf.reduce_all(x > -1),
    "any": lambda x, y, i: tf.reduce_any(x > 1),
    "rows and columns": lambda x, y, i: [tf.shape(x)[0], tf.shape(x)[1], tf.size(x)],
    "how many are positive": lambda x, y, i: tf.reduce_sum(tf.cast(x > 0, tf.int32)),
    "a mean by hand": lambda x, y, i: tf.reduce_sum(x) / count(x),
    "a mean times n": lambda x, y, i: tf.reduce_mean(x) * count(x),
    "texts": lambda x, y, i: tf.as_string(x),
    "sparse": lambda x, y, i: tf.sparse.from_dense(x),
    "a constant": lambda x, y, i: tf.constant([1, 2, 3]),
    "a nest": lambda x, y, i: {"a": [x, (tf.reduce_mean(x),)]},
    "ratio": lambda x, y, i: tf.reduce_sum(x[:, 0]) / tf.reduce_sum(x[:, 1] ** 2),
    "some": lambda x, y, i: tf.boolean_mask(x, x[:, 0] > 0),
    "gradients of a sum": lambda x, y, i: derived(tf.reduce_sum(x * x), x),
    "gradients of rows": lambda x, y, i: derived(x * x, x),
    "a loop by examples": lambda x, y, i: tf.while_loop(
        lambda k: k < tf.reduce_sum(tf.abs(y)), lambda k: k + 1.0, [0.0]
    )[0],
    "one more": lambda x, y, i: tf.shape(x)[0] + 1,
    "half of them": lambda x, y, i: tf.shape(x)[0] // 2,
    "its shape": lambda x, y, i: tf.shape(x),
    "1 / n": lambda x, y, i: 1.0 / count(x),
    "over n": lambda x, y, i: x / count(x),
    "over their sum": lambda x, y, i: x / tf.reduce_sum(x),
    "centred": lambda x, y, i: x - tf.reduce_mean(x, 0),
    "norm": lambda x, y, i: tf.norm(x),
    "deviation": lambda x, y, i: tf.math.reduce_std(x),
    "variance": lambda x, y, i: tf.math.reduce_variance(x, 0),
    "moments": lambda x, y, i: tf.nn.moments(x, [0]),
    "perplexity": lambda x, y, i: tf.exp(tf.reduce_mean(x)),
    "F1": lambda x, y, i: _f1(x[:, 0] > 0, y > 0),
    "R^2": lambda x, y, i: (
        1.0
        - tf.reduce_sum((y - x[:, 0]) ** 2)
        / tf.reduce_sum((y - tf.reduce_mean(y)) ** 2)
    ),
    "the largest's place": lambda x, y, i: tf.argmax(x, 0),
    "distinct": lambda x, y, i: tf.unique(i % 3)[0],
    "sorted": lambda x, y, i: tf.sort(y),
    "median": lambda x, y, i: tf.sort(y)[tf.shape(y)[0] // 2],
    "places": lambda x, y, i: tf.where(y > 0),
    "the first": lambda x, y, i: x[0],
    "three": lambda x, y, i: x[:3],
    "all but one": lambda x, y, i: x[1:],
    "backwards": lambda x, y, i: x[::-1],
    "with a constant": lambda x, y, i: tf.concat([x, tf.ones([2, 3])], 0),
    "twice": lambda x, y, i: tf.concat([x, 2.0 * x], 0),
    "products": lambda x, y, i: tf.matmul(x, x, transpose_b=True),
    "transposed": lambda x, y, i: tf.transpose(x),
    "in one row": lambda x, y, i: tf.reshape(x, [1, -1]),
    "in three": lambda x, y, i: tf.reshape(x, [3, -1]),
    "summed up": lambda x, y, i: tf.cumsum(y),
    "softmax": lambda x, y, i: tf.nn.softmax(y),
    "log of sums": lambda x, y, i: tf.reduce_logsumexp(y),
    "range": lambda x, y, i: tf.range(tf.shape(x)[0]),
    "counts": lambda x, y, i: tf.math.bincount(i % 3, minlength=3, maxlength=3),
    "by segments": lambda x, y, i: tf.math.unsorted_segment_mean(x, i % 3, 3),
    "mean of some": lambda x, y, i: tf.reduce_mean(tf.boolean_mask(x, y > 0)),
    "kept": lambda x, y, i: tf.reduce_max(x, 0, keepdims=True),
    "numbers": lambda x, y, i: tf.stack([tf.reduce_mean(x), tf.reduce_max(y)]),
    "a branch": lambda x, y, i: tf.cond(
        tf.reduce_mean(y) > 0, lambda: tf.reduce_mean(x), lambda: 3.0
    ),
    "a branch of constants": lambda x, y, i: tf.cond(
        tf.reduce_sum(y) > 0.3, lambda: 1, lambda: 2
    ),
    "a branch in a branch": lambda x, y, i: tf.cond(
        tf.reduce_sum(y) > 0.3,
        lambda: tf.cond(tf.size(y) > 4, lambda: tf.reduce_max(x), lambda: 5.0),
        lambda: tf.constant([1.0, 2.0])[tf.size(y) % 2],
    ),
    "gradients of a mean": lambda x, y, i: derived(tf.reduce_mean(x**3), x),
    "gradients of a weighted mean": lambda x, y, i: derived(
        tf.reduce_sum(x[:, 0] ** 3 * tf.abs(y)) / tf.reduce_sum(tf.abs(y)), x
    ),
    "their norms": lambda x, y, i: tf.norm(derived(tf.reduce_mean(x**3), x), axis=1),
    "texts in one": lambda x, y, i: tf.strings.reduce_join(tf.strings.as_string(i)),
    "a mean of whole numbers": lambda x, y, i: tf.reduce_mean(i),
    "a remainder": lambda x, y, i: tf.reduce_sum(i) % 5,
    "rounded": lambda x, y, i: tf.round(tf.reduce_sum(y)),
}

WRITES: dict[str, Any] = {
    "mean": lambda v, n, x, y, i: v.assign(0.9 * v + 0.1 * tf.reduce_mean(y)),
    "sum": lambda v, n, x, y, i: v.assign_add(tf.reduce_sum(y)),
    "average of sums": lambda v, n, x, y, i: v.assign(0.9 * v + tf.reduce_sum(y)),
    "maximum": lambda v, n, x, y, i: v.assign(tf.maximum(v, tf.reduce_max(y))),
    "root": lambda v, n, x, y, i: v.assign(tf.sqrt(tf.reduce_mean(y**2))),
    "deviation": lambda v, n, x, y, i: v.assign(tf.math.reduce_std(y)),
    "the largest, normalized": lambda v, n, x, y, i: v.assign(
        tf.reduce_max(normalized(y))
    ),
    "over n - 0.9": lambda v, n, x, y, i: v.assign(tf.reduce_sum(y) / (count(y) - 0.9)),
    "ratio": lambda v, n, x, y, i: v.assign(tf.reduce_sum(y) / tf.reduce_sum(y**2)),
    "a branch of constants": lambda v, n, x, y, i: v.assign(
        tf.cond(tf.reduce_sum(y) > 0.3, lambda: 1.5, lambda: 2.5)
    ),
    "1 / n": lambda v, n, x, y, i: v.assign(1.0 / count(x)),
    "count": lambda v, n, x, y, i: n.assign_add(tf.shape(x)[0]),
    "one more": lambda v, n, x, y, i: n.assign(tf.shape(x)[0] + 1),
    "whole numbers": lambda v, n, x, y, i: n.assign_add(tf.reduce_sum(i)),
    "the largest": lambda v, n, x, y, i: n.assign(tf.reduce_max(i)),
    "median": lambda v, n, x, y, i: v.assign(tf.sort(y)[tf.size(y) // 2]),
    "the three largest": lambda v, n, x, y, i: v.assign(
        tf.reduce_mean(tf.math.top_k(tf.tile(y, [2]), 3).values)
    ),
    "a sorted number": lambda v, n, x, y, i: n.assign(tf.sort(i)[1]),
}
