# SPDX-License-Identifier: Apache-2.0
"""Rules of batch normalization and of means with their variances."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator.forms import engine
from replicator.forms.forms import REPLICATED, Partial
from replicator.forms.propagate import GraphPlan
from replicator.forms.rules import normalization
from tests.forms.laws import SUM, WHOLE, Inputs, Sample

raw = tf.raw_ops
AXES = [0, 1, 2]
PARAMETERS = {
    "scale": np.array([1.0, 2.0], np.float32),
    "offset": np.array([0.5, -1.0], np.float32),
}
OLD = {
    "mean": np.array([0.3, -0.1], np.float32),
    "variance": np.array([1.5, 0.8], np.float32),
}
EMPTY = {"mean": np.zeros([0], np.float32), "variance": np.zeros([0], np.float32)}


def image(v: Inputs, name: str = "x") -> tf.Tensor:
    return v(name, 3, 2, 2)


def normalized(name: str, given: Any, **options: Any) -> Sample:
    """Returns a sample of a fused op, with what it returns for moving averages."""
    kernel = getattr(raw, name)
    given = {**PARAMETERS, **given, **options}
    return Sample(name, lambda v: kernel(x=image(v), **given)[:3])


def gradient(name: str, is_training: bool) -> Sample:
    """Returns a sample of a gradient whose statistics come from elsewhere."""
    kernel = getattr(raw, name)
    more = {"reserve_space_3": np.zeros([0], np.float32)} if name.endswith("V3") else {}

    def make(v: Inputs) -> Any:
        x, dy = image(v), image(v, "y")
        found = [tf.reduce_mean(x, AXES), tf.math.reduce_variance(x, AXES)]
        if not is_training:
            found = list(OLD.values())
        saved = {f"reserve_space_{k + 1}": one for k, one in enumerate(found)}
        scale = PARAMETERS["scale"]
        given = {"y_backprop": dy, "x": x, "scale": scale, **saved, **more}
        return kernel(**given, is_training=is_training)[:3]

    return Sample(name, make, grads=False)


def moments(v: Inputs) -> Any:
    """Returns what Keras' and Sonnet's layers compute, and the statistics."""
    mean, variance = tf.nn.moments(image(v), AXES)
    around = (mean, variance, [0.5, 1.0], [1.0, 2.0])
    return [tf.nn.batch_normalization(image(v), *around, 1e-3), mean, variance]


VERSIONS = ("", "V2", "V3")
SAMPLES = [
    *[normalized(f"FusedBatchNorm{v}", EMPTY) for v in VERSIONS],
    *[normalized(f"FusedBatchNorm{v}", OLD, is_training=False) for v in VERSIONS],
    normalized("FusedBatchNormV3", OLD, exponential_avg_factor=0.3),
    *[gradient(f"FusedBatchNormGrad{v}", True) for v in VERSIONS],
    *[gradient(f"FusedBatchNormGrad{v}", False) for v in VERSIONS],
    Sample("Mean", moments, WHOLE),
    Sample("Mean", lambda v: tf.nn.moments(v.x, [1], keepdims=True)),
    Sample("Mean", lambda v: tf.reduce_mean(v.x), SUM),
]


def on_replicas(step: Any, channels: int = 2) -> engine.WholeBatchFunction:
    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    return engine.WholeBatchFunction(step, repl, [tf.TensorSpec([None, channels])])


def test_a_small_variance_around_a_large_mean_is_accurate() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.moments(x, [0])[1]

    x = np.random.default_rng(0).normal([3000.0, -500.0], 0.1, [64, 2]).astype("f")
    want = x.astype(np.float64).var(0)
    np.testing.assert_allclose(on_replicas(step)(x), want, rtol=1e-3)


def test_moments_of_one_layer_are_one_message_forward_and_one_backward() -> None:
    """Counted in the plan: conversions of sums, and ops that add up themselves."""

    def step(x: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, [0])
        y = tf.nn.batch_normalization(x, mean, variance, [0.0, 1.0], [1.0, 2.0], 1e-3)
        return tf.gradients(y, x, tf.cos(y))

    plan = on_replicas(step).program((0,)).plan
    types = [op.type for op, its in plan.plans.items() if _adds_up(plan, op)]
    # The two gradients are of the mean and of the variance, which one message takes.
    assert sorted(types) == ["BroadcastTo", "BroadcastTo", "Mean"]


def _adds_up(plan: GraphPlan, op: tf.Operation) -> bool:
    its = plan.plans[op]
    pairs = zip(op.inputs, its.needs, strict=True)
    is_mean = getattr(its.build, "func", None) is normalization._mean
    return is_mean or any(
        isinstance(plan.fact(t).form, Partial) and need == REPLICATED
        for t, need in pairs
    )
