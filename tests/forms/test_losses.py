# SPDX-License-Identifier: Apache-2.0
"""Losses as users write them, most of which compare the examples of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator

Weights = list[tf.Variable]
Loss = Callable[[Weights, tf.Tensor, tf.Tensor], tf.Tensor]


def supervised_contrastive(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = tf.math.l2_normalize(x @ w[0] + w[1], 1)
    similar = z @ tf.transpose(z) / 0.5
    itself = tf.eye(tf.shape(x)[0])
    positive = tf.cast(y[:, None] == y[None, :], tf.float32) - itself
    others = tf.reduce_logsumexp(similar - 1e9 * itself, 1, keepdims=True)
    count = tf.maximum(tf.reduce_sum(positive, 1), 1.0)
    return -tf.reduce_mean(tf.reduce_sum(positive * (similar - others), 1) / count)


def hardest_examples(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ w[0] + w[1])
    values, _ = tf.math.top_k(losses, tf.maximum(tf.shape(losses)[0] // 2, 1))
    return tf.reduce_mean(values)


def triplet(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = x @ w[0]
    distances = tf.reduce_sum((z[:, None] - z[None]) ** 2, -1)
    same = tf.cast(y[:, None] == y[None], tf.float32)
    farthest = tf.reduce_max(distances * same, 1)
    nearest = tf.reduce_min(distances + 1e3 * same, 1)
    return tf.reduce_mean(tf.nn.relu(farthest - nearest + 1.0))


def focal_and_masked(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    mask = tf.cast(x[:, 0] > 0, tf.float32)
    p = tf.gather(tf.nn.softmax(x @ w[0] + w[1]), y, batch_dims=1)
    losses = -((1 - p) ** 2) * tf.math.log(p + 1e-6) * mask
    return tf.reduce_sum(losses) / (tf.reduce_sum(mask) + 1.0)


def of_selected_rows(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    chosen, labels = tf.boolean_mask(x, x[:, 1] > 0), tf.boolean_mask(y, x[:, 1] > 0)
    logits = chosen @ w[0] + w[1]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    count = tf.cast(tf.maximum(tf.size(losses), 1), tf.float32)
    return tf.reduce_sum(losses) / count + 0.01 * tf.nn.l2_loss(w[0])


def covariance(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = x @ w[0]
    z -= tf.reduce_mean(z, 0)
    found = tf.transpose(z) @ z / tf.cast(tf.shape(z)[0], tf.float32)
    return tf.reduce_mean((found - tf.eye(6)) ** 2)


def recurrent(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    def cell(h: tf.Tensor, t: tf.Tensor) -> tf.Tensor:
        return tf.tanh(t[:, None] * w[1] + h @ w[2] * 0.1)

    states = tf.scan(cell, tf.transpose(x), tf.zeros([tf.shape(x)[0], 6]))
    return tf.reduce_mean(states[-1] ** 2) + tf.reduce_max(states)


def gradient_penalty(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        output = tf.reduce_sum(tf.tanh(x @ w[0]) ** 2)
    norms = tf.norm(tape.gradient(output, x) + 1e-6, axis=1)
    return tf.reduce_mean((norms - 1) ** 2)


def gradient_of_its_own(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def normalized(value: tf.Tensor) -> Any:
        return value, lambda upstream: upstream / (tf.norm(upstream) + 1.0)

    return tf.reduce_mean(normalized(x @ w[0]) ** 2)


def branches(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = x @ w[0]
    mean = tf.reduce_mean(z)
    return tf.cond(
        mean > 0,
        lambda: mean * 2 + tf.reduce_max(z),
        lambda: mean * mean - tf.reduce_min(z),
    )


def of_sorted_neighbours(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    ordered = tf.sort((x @ w[0])[:, 0])
    return tf.reduce_sum((ordered[1:] - ordered[:-1]) ** 2)


def mapped(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    def one(row: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(row[None] @ w[0]) ** 2

    return tf.reduce_mean(tf.vectorized_map(one, x)) + tf.reduce_sum(tf.map_fn(one, x))


def centers(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = x @ w[0]
    means = tf.math.unsorted_segment_mean(z, y, 3)
    return tf.reduce_sum((z - tf.gather(means, y)) ** 2)


def by_frequency(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    _, places, counts = tf.unique_with_counts(y)
    often = tf.cast(tf.gather(counts, places), tf.float32)
    return tf.reduce_mean((x @ w[0]) * often[:, None] ** 2)


def ranks(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = (x @ w[0])[:, 0]
    return tf.reduce_mean(z * tf.cast(tf.argsort(tf.argsort(z)), tf.float32))


def order_statistics(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = x @ w[0]
    median = tf.sort(z, 0)[tf.shape(z)[0] // 2]
    sums = tf.reduce_mean(tf.math.cumsum(z, 0))
    return tf.reduce_mean(median**2) + tf.math.reduce_std(z) + sums


def moved(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    z = x @ w[0]
    differences = tf.reduce_mean((tf.roll(z, 1, 0) - z) ** 2)
    return differences + tf.reduce_mean(tf.reverse(z, [0]) * z)


def of_two_views(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    first, second = tf.split(tf.concat([x, x * 2], 0) @ w[0], 2, 0)
    return tf.reduce_mean(tf.nn.softmax(first @ tf.transpose(second)) ** 2)


def by_python(w: Weights, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    centered = tf.numpy_function(lambda a: a - a.mean(0), [x], tf.float32)
    return tf.reduce_mean((tf.ensure_shape(centered, x.shape) @ w[0]) ** 2)


LOSSES: list[Loss] = [
    supervised_contrastive,
    of_selected_rows,
    centers,
    hardest_examples,
    triplet,
    focal_and_masked,
    covariance,
    recurrent,
    gradient_penalty,
    gradient_of_its_own,
    branches,
    of_sorted_neighbours,
    mapped,
    by_frequency,
    ranks,
    order_statistics,
    moved,
    of_two_views,
    by_python,
]


def _trained(loss: Loss, scope: Any, wrap: Callable[..., Any]) -> list[np.ndarray]:
    """Returns the results of some steps on batches of several sizes, and weights."""
    rng = np.random.default_rng(7)
    with scope:
        w = [
            tf.Variable(rng.normal(size=shape).astype("float32"))
            for shape in ([4, 6], [6], [6, 6])
        ]

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            value = loss(w, x, y)
        zero = tf.UnconnectedGradients.ZERO
        gradients, norm = tf.clip_by_global_norm(
            tape.gradient(value, w, unconnected_gradients=zero), 1.0
        )
        for variable, gradient in zip(w, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return value, norm, x @ w[0]

    run, results = wrap(step), []
    for size in (7, 6, 2, 1, 11):
        x, y = rng.normal(size=[size, 4]), rng.integers(0, 3, size)
        results += run(x.astype("float32"), y.astype("int32"))
    return [np.asarray(value) for value in [*results, *w]]


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(one, marks=[] if k < 3 else pytest.mark.slow, id=one.__name__)
        for k, one in enumerate(LOSSES)
    ],
)
def test_any_loss_trains_as_on_one_device(loss: Loss) -> None:
    wanted = _trained(loss, contextlib.nullcontext(), tf.function)
    for devices in (["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2"]):
        autodist = replicator.AutoDist(devices)
        found = _trained(loss, autodist.scope(), autodist.function)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
