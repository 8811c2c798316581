# SPDX-License-Identifier: Apache-2.0
"""AutoDist's own programs compute the same on replicas as on one device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist import helpers, programs, trained
from tests.helpers import v1_control_flow

v1 = tf.compat.v1


@functools.cache
def _on_one_device(program: Any) -> Any:
    return helpers.run(program, None)


@pytest.mark.battery(4)
@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize(
    "num_replicas, plan",
    [(2, "PartitionedPS"), (1, "mirrored"), (2, "sharded"), (3, "mirrored")],
)
def test_programs_compute_what_they_do_on_one_device(program, num_replicas, plan):
    made = trained.BUILDERS.get(plan, lambda: plan)()
    actual = helpers.run(program, num_replicas, made)
    helpers.assert_equal(actual, _on_one_device(program))


@pytest.mark.parametrize(
    "program", [programs.while_loop, programs.embeddings, programs.dynamic_lstm]
)
def test_so_they_do_with_the_control_flow_of_tensorflow_1(program):
    with v1_control_flow():
        actual = helpers.run(program, 2, "sharded", sizes=(5, 4))
        helpers.assert_equal(actual, helpers.run(program, None, sizes=(5, 4)))


def _data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    np.random.seed(seed)
    x, noise = np.random.randn(1000), np.random.randn(1000)
    return x.astype(np.float32), (3 * x + 2 + noise).astype(np.float32)


_WHOLES = [name for name in trained.BUILDERS if name != "columns"]  # of numbers


# The values of AutoDist's own test, for the data of one worker, of two workers, and of
# two of which the first has twice as much.
@pytest.mark.battery(10)
@pytest.mark.parametrize("variables", ["mirrored", "sharded", *_WHOLES])
@pytest.mark.parametrize(
    "num_replicas, seeds, w_then, b_then",
    [
        (1, [123], 4.957685286, 0.04175034879),
        (2, [123], 4.957685286, 0.04175034879),
        (2, [123, 456], 4.959388831, 0.041151709775),
        (3, [123, 123, 456], 4.958820982, 0.041351256),
        (2, [123, 123, 456], 4.958820982, 0.041351256),
    ],
)
def test_the_values_of_autodists_regression(
    num_replicas, seeds, w_then, b_then, variables
):
    strategy = trained.BUILDERS.get(variables, lambda: variables)()
    autodist = helpers.make(num_replicas, strategy)
    with tf.Graph().as_default(), autodist.scope():
        x, y = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
        w, b = tf.Variable(5.0), tf.Variable(0.0)
        loss = tf.reduce_mean((w * x + b - y) ** 2)
        train = v1.train.GradientDescentOptimizer(0.01).minimize(loss)
        session = autodist.create_distributed_session()
        data = [np.concatenate(part) for part in zip(*map(_data, seeds), strict=True)]
        value, _ = session.run([loss, train], dict(zip((x, y), data, strict=True)))
        actual = session.run([w, b])
    np.testing.assert_allclose(actual, [w_then, b_then], rtol=0, atol=1e-6)
    if seeds == [123]:
        np.testing.assert_allclose(value, 9.401788026, rtol=1e-6)
