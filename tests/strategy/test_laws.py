# SPDX-License-Identifier: Apache-2.0
"""Training equals one device's under any strategy, and AutoDist's values hold."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.strategy import laws

# AutoDist's own test, recomputed: W and b after one step of SGD with rate 0.01 from
# W = 5, b = 0 on y = 3x + 2 + noise, by the seeds of the workers and their weights.
REGRESSION = {
    "one worker": ((123,), (1,), 4.957685286, 0.04175034879),
    "two workers": ((123, 456), (1, 1), 4.959388831, 0.041151709775),
    "weighed 2 to 1": ((123, 456), (2, 1), 4.958820982, 0.041351256),
}


def _points(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(seed)
    x, noise = rng.randn(1000), rng.randn(1000)
    return x, x * 3 + 2 + noise


@pytest.mark.battery(5)
@pytest.mark.parametrize("case", REGRESSION)
@pytest.mark.parametrize("builder", laws.BUILDERS)
def test_linear_regression_has_autodist_s_values(builder: str, case: str) -> None:
    seeds, weights, expected_w, expected_b = REGRESSION[case]
    repl = helpers.make(len(seeds), strategy=_given(builder, "W"))
    with repl.context():
        w = tf.Variable(5.0, name="W", dtype=tf.float64)
        b = tf.Variable(0.0, name="b", dtype=tf.float64)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.01))

    def step_fn() -> None:
        x, y = _points(seeds[repl.replica_id])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((w * x + b - y) ** 2)
        optimizer.apply(
            *(tape.gradient(loss, [w, b]), [w, b]), weight=weights[repl.replica_id]
        )

    repl.run(step_fn)
    np.testing.assert_allclose(
        [w.numpy(), b.numpy()], [expected_w, expected_b], 0, 1e-6
    )


def _given(builder: str, only: str = "") -> Any:
    """Returns a builder; with rules, only those that match something."""
    result = laws.BUILDERS[builder]()
    if isinstance(result, dict) and only:
        return {only: result[".*"]}
    return result


@functools.cache
def _expected(network: str, optimizer: str) -> Any:
    losses, values, _ = laws.trained(
        helpers.make(1, variables="mirrored"), network, optimizer
    )
    return losses, values


def _check(builder: str, network: str, optimizer: str, count: int) -> None:
    repl = helpers.make(count, strategy=_given(builder))
    losses, values, variables = laws.trained(repl, network, optimizer)
    expected = _expected(network, optimizer)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5, atol=1e-6)
    for one, two in zip(values, expected[1], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    assert {node.name for node in repl.strategy.nodes} >= {
        getattr(v, "path", v.name.partition(":")[0]) for v in variables
    }
    if count > 1:
        for variable in variables:
            inside = getattr(variable, "value", variable)
            inside = variable if callable(inside) else inside
            helpers.assert_replicas_equal(getattr(inside, "parts", [inside]))


_COLUMNS = (laws.BUILDERS, laws.NETWORKS, laws.OPTIMIZERS)


def _sample() -> list[tuple[str, str, str, int]]:
    """Returns a case for each builder, which together include everything else."""
    rng = random.Random(11)
    rows = []
    networks, optimizers = list(laws.NETWORKS), list(laws.OPTIMIZERS)
    for k, builder in enumerate(laws.BUILDERS):
        network = networks[k % len(networks)]
        optimizer = optimizers[(k + k // len(networks)) % len(optimizers)]
        rows.append((builder, network, optimizer, rng.choice((2, 3))))
    return rows


@pytest.mark.battery(5)
@pytest.mark.parametrize(("builder", "network", "optimizer", "count"), _sample())
def test_training_is_that_of_one_device(
    builder: str, network: str, optimizer: str, count: int
) -> None:
    _check(builder, network, optimizer, count)


@pytest.mark.slow
@pytest.mark.parametrize("builder", laws.BUILDERS)
@pytest.mark.parametrize("network", laws.NETWORKS)
def test_training_is_that_of_one_device_whatever_there_is(
    builder: str, network: str
) -> None:
    k = list(laws.BUILDERS).index(builder) + list(laws.NETWORKS).index(network)
    _check(builder, network, list(laws.OPTIMIZERS)[k % 4], k % 3 + 1)


def test_the_sample_has_everything() -> None:
    for k, names in enumerate(_COLUMNS):
        assert {row[k] for row in _sample()} == set(names)
