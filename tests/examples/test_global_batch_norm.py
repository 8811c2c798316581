# SPDX-License-Identifier: Apache-2.0
"""examples/global_batch_norm.py: its layer, compared with float64, and the program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.examples import programs

SHARDS = [(6,), (4, 4), (5, 1, 2), (0, 3, 0, 4)]
OFFSETS = [0.0, 1e4]


example = programs.load("global_batch_norm")


def batch(rows: int, offset: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs [rows, 2, 3] of deviation 1, and the weights of the outputs."""
    random = np.random.default_rng(rows)
    inputs = random.normal(size=[rows, 2, 3]) + [offset, -offset, offset / 2]
    weights = random.normal(size=[rows, 2, 3])
    return inputs.astype(np.float32), weights.astype(np.float32)


def on_replicas(
    inputs: np.ndarray, weights: np.ndarray, shards: Sequence[int], mode: str
) -> dict[str, np.ndarray]:
    repl = helpers.make(len(shards))
    cuts = np.cumsum(shards)[:-1]

    def make_step() -> Callable[[], Any]:
        layer = example.GlobalBatchNorm(repl)
        layer.build((None, 2, 3))

        def step_fn() -> Any:
            x, w = (
                helpers.opaque(np.split(a, cuts)[repl.replica_id], [None, 2, 3])
                for a in (inputs, weights)
            )
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                loss = tf.reduce_sum(y * w)
            gradients = tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])
            with tf.control_dependencies([y]):
                moving = [layer.moving_mean.value, layer.moving_variance.value]
                return y, gradients, [v.read_value() for v in moving]

        return step_fn

    y, (dx, dgamma, dbeta), moving = helpers.run(mode, repl, make_step)
    for value in moving:
        assert len({replica.tobytes() for replica in value}) == 1
    return {
        "outputs": np.concatenate(y),
        "inputs": np.concatenate(dx),
        "gamma": np.sum(dgamma, 0),
        "beta": np.sum(dbeta, 0),
        "moving_mean": moving[0][0],
        "moving_variance": moving[1][0],
    }


def in_float64(inputs: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """The same by the definition, in float64 and on one device."""
    x, w = inputs.astype(np.float64), weights.astype(np.float64)
    outputs, gradients = example.in_float64(x.reshape(-1, 3), w.reshape(-1, 3))
    return {
        "outputs": outputs.reshape(x.shape),
        "inputs": gradients.reshape(x.shape),
        "gamma": (outputs.reshape(x.shape) * w).sum((0, 1)),
        "beta": w.sum((0, 1)),
        "moving_mean": 0.1 * x.mean((0, 1)),
        "moving_variance": 0.9 + 0.1 * x.var((0, 1)),
    }


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.battery(2)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("shards", SHARDS, ids=str)
def test_the_layer_is_right_to_rounding(shards: Sequence[int], offset: float) -> None:
    inputs, weights = batch(sum(shards), offset)
    assert_close(
        on_replicas(inputs, weights, shards, "eager"), in_float64(inputs, weights)
    )


@pytest.mark.parametrize("mode", ["function", "session"])
def test_it_is_in_functions_and_sessions(mode: str) -> None:
    inputs, weights = batch(5, 1e4)
    assert_close(
        on_replicas(inputs, weights, (2, 3), mode), in_float64(inputs, weights)
    )


def test_in_float64_is_what_tensorflow_differentiates() -> None:
    """The reference itself, compared with automatic differentiation."""
    inputs, weights = (a.reshape(-1, 3).astype(np.float64) for a in batch(4, 1.0))
    x = tf.constant(inputs)
    with tf.GradientTape() as tape:
        tape.watch(x)
        mean, variance = tf.nn.moments(x, [0])
        y = (x - mean) / tf.sqrt(variance + example.EPSILON)
        loss = tf.reduce_sum(y * weights)
    outputs, gradients = example.in_float64(inputs, weights)
    np.testing.assert_allclose(y, outputs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(tape.gradient(loss, x), gradients, rtol=1e-9, atol=1e-9)


def test_nothing_at_all_makes_no_nan() -> None:
    inputs, weights = batch(0, 0.0)
    actual = on_replicas(inputs, weights, (0, 0), "eager")
    for name, value in actual.items():
        assert np.all(np.isfinite(value)), name


def test_a_trained_layer_normalizes_by_its_moving_statistics() -> None:
    repl = helpers.make(2)
    with repl.context():
        layer = example.GlobalBatchNorm(repl, momentum=0.0)
    inputs, _ = batch(6, 1e4)
    cuts = np.split(inputs, [2])
    repl.run(lambda: layer(cuts[repl.replica_id], training=True))
    outputs = layer(inputs, training=False)
    expected = in_float64(inputs, inputs)["outputs"]
    # The moving mean is one float32: half a unit in the last place of 1e4.
    np.testing.assert_allclose(outputs, expected, atol=2e-3)


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (1, 0, 5), (0, 0, 2)], ids=str)
def test_merged_sets_are_as_the_whole_set(sizes: Sequence[int]) -> None:
    whole = np.random.default_rng(0).normal(5.0, 2.0, [sum(sizes), 3])
    parts = np.split(whole, np.cumsum(sizes)[:-1])
    means = [part.mean(0) if len(part) else np.ones(3) for part in parts]
    squares = [
        ((part - mean) ** 2).sum(0) for part, mean in zip(parts, means, strict=True)
    ]
    counts = np.array(sizes, np.float64)
    mean, total = example.merge(*map(tf.constant, (counts, means, squares)))
    np.testing.assert_allclose(mean, whole.mean(0))
    np.testing.assert_allclose(total, ((whole - whole.mean(0)) ** 2).sum(0), atol=1e-12)


# --- The program ----------------------------------------------------------------------


@pytest.mark.slow
def test_the_program_says_how_wrong_each_is() -> None:
    result = programs.run(
        "global_batch_norm", "--devices=CPU:0,CPU:1,CPU:2", "--global_batch_size=63"
    )
    assert result.status == 0, result.stderr
    rows = dict(re.findall(r"(?m)^(merged|naive) +(\S.*)$", result.stdout))
    outputs, gradients, right = map(float, rows["merged"].split())
    assert outputs < 1e-5
    assert gradients < 1e-4
    assert right > 0.8  # the naive one guesses; 0.89 to 0.95 by batch size
    outputs, gradients, right = map(float, rows["naive"].split())
    assert outputs > 1
    assert gradients > 1
    assert right < 0.5
