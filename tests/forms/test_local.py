# SPDX-License-Identifier: Apache-2.0
"""Statistics of each replica's own rows: the law, and what they are not used for.

The law: rows, and gradients by rows, are those of one device that is given each
replica's rows alone; gradients by what all rows use are the sums of these, and
statistics their means, weighted by rows.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.forms import engine
from replicator.forms.forms import REPLICATED, Own, Partial
from replicator.forms.propagate import GraphPlan

raw = tf.raw_ops
FUSED = [1.0, 2.0, -0.5]  # scales; the offsets are their negatives
Parts = list[list[np.ndarray]]  # for each replica with rows, what one device returns


def numbers(rows: int, *shape: int, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng(rows).normal(1.0, 2.0, [rows, *shape]).astype(dtype)


def on_replicas(
    step: Callable[..., Any], x: np.ndarray, replicas: int = 2, scale: Any = None
) -> engine.WholeBatchFunction:
    repl = replicator.Replicator([f"cpu:{k}" for k in range(replicas)])
    repl = repl._with(local_statistics=True)
    specs = [tf.TensorSpec([None, *x.shape[1:]], x.dtype)]
    if scale is not None:
        specs.append(tf.TensorSpec(scale.shape, scale.dtype))
    return engine.WholeBatchFunction(step, repl, specs, empty=True)


def of_parts(
    step: Callable[..., Any], x: np.ndarray, replicas: int, *scale: np.ndarray
) -> tuple[Parts, np.ndarray]:
    """Returns what one device makes of each replica's rows, and the shares of rows."""
    parts = [part for part in np.array_split(x, replicas) if len(part)]
    plain = tf.function(step)
    results = [[np.asarray(one) for one in plain(part, *scale)] for part in parts]
    return results, np.array([len(part) / len(x) for part in parts])


def layer(x: tf.Tensor, scale: tf.Tensor, by: str, axis: int = -1) -> Any:
    """Returns what a layer makes of rows, and the statistics."""
    along = [k for k in range(len(x.shape)) if k != axis % len(x.shape)]
    keeps = axis != -1
    mean, variance = tf.nn.moments(x, along, keepdims=keeps)
    if keeps:
        scale = tf.reshape(scale, [-1, *[1] * (len(x.shape) - 1 - axis)])
    if by == "standard deviation":
        y = (x - mean) / tf.sqrt(tf.maximum(variance, 0.0) + 1e-3) * scale + scale
    elif by == "no scale":
        y = tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)
        y *= scale
    else:
        y = tf.nn.batch_normalization(x, mean, variance, -scale, scale, 1e-3)
    return y, mean, variance


def by_tape(by: str, axis: int = -1) -> Callable[..., Any]:
    def step(x: tf.Tensor, scale: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, scale])
            z, mean, variance = layer(x, scale, by, axis)
            y, *_ = layer(tf.sin(z) * x, scale, by, axis)
            loss = tf.reduce_sum(y * tf.cos(x))
        dx, ds = tape.gradient(loss, [x, scale])
        return y, dx, ds, 0.9 * scale + 0.1 * tf.reshape(mean, [-1]), variance

    return step


def by_gradients(x: tf.Tensor, scale: tf.Tensor) -> Any:
    y, mean, variance = layer(x, scale, "scale")
    return y, *tf.gradients(y, [x, scale], tf.cos(y)), mean, variance


def check(
    step: Callable[..., Any], x: np.ndarray, scale: np.ndarray, replicas: int
) -> None:
    """Checks the law of (rows, by rows, by the scale, statistics)."""
    found = on_replicas(step, x, replicas, scale)(x, scale)
    parts, shares = of_parts(step, x, replicas, scale)
    rows, by_rows, by_scale, *statistics = zip(*parts, strict=True)
    wanted = [np.concatenate(rows), np.concatenate(by_rows), np.sum(by_scale, 0)]
    wanted += [np.tensordot(shares, np.stack(one), 1) for one in statistics]
    exact = x.dtype == np.float64
    for have, want in zip(found, wanted, strict=True):
        tolerance = 1e-12 if exact else 1e-4
        np.testing.assert_allclose(have, want, tolerance, 10 * tolerance)


SCALE = np.array(FUSED)
KINDS = ("scale", "no scale", "standard deviation")


@pytest.mark.parametrize("by", KINDS)
@pytest.mark.parametrize(("rows", "replicas"), [(5, 2), (7, 3)])
def test_law(by: str, rows: int, replicas: int) -> None:
    check(by_tape(by), numbers(rows, 3), SCALE, replicas)


def test_law_of_images_whose_channels_are_first() -> None:
    check(by_tape("scale", 1), numbers(5, 3, 4, 2), SCALE, 2)


def test_law_of_images_in_single_precision() -> None:
    images = numbers(5, 4, 2, 3, dtype=np.float32)
    check(by_tape("scale"), images, SCALE.astype(np.float32), 2)


def test_law_of_tf_gradients() -> None:
    check(by_gradients, numbers(5, 3), SCALE, 2)


def test_replicas_without_rows_take_no_part() -> None:
    check(by_tape("scale"), numbers(2, 3, 2, 3), SCALE, 3)


def fused(x: tf.Tensor, scale: tf.Tensor) -> Any:
    y, mean, variance, *_ = raw.FusedBatchNormV3(
        x=x, scale=scale, offset=-scale, mean=[], variance=[], is_training=True
    )
    return y, *tf.gradients(y, [x, scale], tf.cos(y)), mean, variance


def test_law_of_fused_ops() -> None:
    check(fused, numbers(5, 3, 2, 3, dtype=np.float32), np.float32(FUSED), 2)


def messages(plan: GraphPlan) -> collections.Counter[str]:
    """Returns the types of ops that take sums or own statistics of all replicas."""
    return collections.Counter(
        op.type
        for op, its in plan.plans.items()
        for t, need in zip(op.inputs, its.needs, strict=True)
        if need == REPLICATED and isinstance(plan.fact(t).form, Partial | Own)
    )


def test_layers_send_nothing() -> None:
    x = numbers(5, 3)
    for step in (by_tape("scale"), by_gradients):
        assert not messages(on_replicas(step, x, 2, SCALE).program((0, None)).plan)


# What stays that of the whole batch, with a warning.


def in_function(x: tf.Tensor) -> Sequence[tf.Tensor]:
    scale = tf.constant(FUSED, x.dtype)
    return tf.function(lambda x: layer(x, scale, "scale"))(x)


def in_branch(x: tf.Tensor) -> Sequence[tf.Tensor]:
    scale = tf.constant(FUSED, x.dtype)
    is_positive = tf.reduce_sum(x) > 0
    return tf.cond(
        is_positive, lambda: layer(x, scale, "scale")[0], lambda: -x
    ), is_positive


def in_a_loss(x: tf.Tensor) -> Sequence[tf.Tensor]:
    y, mean, variance = layer(x, tf.constant(FUSED, x.dtype), "scale")
    penalty = tf.reduce_sum(mean**2 + tf.sqrt(variance))
    return y, penalty, *tf.gradients(penalty + tf.reduce_sum(tf.cos(y)), x)


def combined_with_a_sum(x: tf.Tensor) -> Sequence[tf.Tensor]:
    y, *_ = layer(x, tf.reduce_mean(tf.sin(x), 0) + 1.0, "scale")
    return y, *tf.gradients(tf.reduce_sum(tf.cos(y)), x)


def centered_twice(x: tf.Tensor) -> Sequence[tf.Tensor]:
    """A mean of the same rows that is no statistic has a gradient like theirs."""
    y, *_ = layer(x, tf.constant(FUSED, x.dtype), "scale")
    z = y * (x - tf.reduce_mean(x, 0, keepdims=True))
    return z, *tf.gradients(z, x, tf.cos(z))


def second_derivative(x: tf.Tensor) -> Sequence[tf.Tensor]:
    y, *_ = layer(x, tf.constant(FUSED, x.dtype), "scale")
    (by_x,) = tf.gradients(y, x, tf.cos(y))
    return y, *tf.gradients(tf.reduce_sum(by_x**2), x)


def written_and_read(x: tf.Tensor) -> Sequence[tf.Tensor]:
    y, mean, _ = layer(x, tf.constant(FUSED, x.dtype), "scale")
    return y, x @ tf.linalg.diag(mean)


MISSED = (
    *(in_function, in_branch, in_a_loss, combined_with_a_sum, centered_twice),
    *(second_derivative, written_and_read),
)


@pytest.mark.parametrize("step", MISSED, ids=lambda step: step.__name__)
def test_others_are_those_of_the_whole_batch(step: Any, caplog: Any) -> None:
    x = numbers(5, 3)
    found = on_replicas(step, x)(x)
    for have, want in zip(found, tf.function(step)(x), strict=True):
        np.testing.assert_allclose(have, want, 1e-10, 1e-11)
    assert "leaves 2 statistics of batch normalization those of" in caplog.text
    assert "tests/forms/test_local.py:" in caplog.text


def test_no_warning_of_what_has_no_statistics(caplog: Any) -> None:
    x = numbers(5, 3)
    on_replicas(lambda x: [x - tf.reduce_mean(x), tf.reduce_mean(x, 0)], x)(x)
    assert not caplog.text
