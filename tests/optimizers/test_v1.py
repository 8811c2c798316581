# SPDX-License-Identifier: Apache-2.0
"""tf.compat.v1.train optimizers, in all three ways of running."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.optimizers import problem

v1 = tf.compat.v1

CATALOGUE = {
    "GradientDescent": lambda: v1.train.GradientDescentOptimizer(0.1),
    "Momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "Adam": lambda: v1.train.AdamOptimizer(0.1),
    "Adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "RMSProp": lambda: v1.train.RMSPropOptimizer(0.1, momentum=0.5, centered=True),
    "Ftrl": lambda: v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
}


@functools.cache
def _plain(name: str) -> list[np.ndarray]:
    return problem.train_plain(problem.V1, CATALOGUE[name], problem.batches(3))


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", CATALOGUE)
def test_equals_plain_on_the_whole_batch(name: str, mode: str) -> None:
    actual = problem.train(
        helpers.make(2), problem.V1, CATALOGUE[name], problem.batches(3), mode
    )
    problem.assert_close(actual, _plain(name))
    assert np.max(np.abs(actual[1] - problem.MATRIX)) > 1e-4


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", ["Momentum", "Adam"])
def test_made_inside_the_step(name: str, mode: str) -> None:
    actual = problem.train(
        helpers.make(3),
        problem.V1,
        CATALOGUE[name],
        problem.batches(3),
        mode,
        inside=True,
    )
    problem.assert_close(actual, _plain(name))


def _minimize(how: str, mode: str) -> tuple[list[np.ndarray], int]:
    """Takes two steps; returns the components of w and of the global step."""
    repl = helpers.make(2)
    symbolic = mode == "session"

    def make_step() -> Any:
        with repl.context():
            w = tf.Variable(np.float64([1.0, 2.0]), name="w")
            step = tf.Variable(0, dtype=tf.int64, trainable=False, name="global_step")
            optimizer = repl.wrap_optimizer(v1.train.MomentumOptimizer(0.25, 0.5))
        variables.extend([w, step])

        def step_fn() -> tf.Tensor:
            def loss() -> tf.Tensor:
                return tf.reduce_sum(w * w) * (repl.replica_id + 1.0)

            if how == "minimize":
                update = optimizer.minimize(
                    loss() if symbolic else loss, global_step=step, var_list=[w]
                )
            else:
                pairs = optimizer.compute_gradients(
                    loss() if symbolic else loss, var_list=[w]
                )
                assert pairs[0][1] is w
                update = optimizer.apply_gradients(pairs, global_step=step)
            with tf.control_dependencies([update] if symbolic else []):
                return w.read_value(), step.read_value()

        return step_fn

    variables: list[tf.Variable] = []
    values, steps = helpers.run(mode, repl, make_step, steps=2)
    assert values[0].tobytes() == values[1].tobytes()
    assert steps[0] == steps[1]
    return list(values), int(steps[0])


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("how", ["minimize", "compute_gradients"])
def test_minimize_counts_the_global_step_once(how: str, mode: str) -> None:
    values, steps = _minimize(how, mode)
    w, velocity = np.float64([1.0, 2.0]), 0.0
    for _ in range(2):
        velocity = 0.5 * velocity + 2 * w * 1.5  # the mean of 1 and 2
        w = w - 0.25 * velocity
    np.testing.assert_allclose(values[0], w, rtol=1e-12)
    assert steps == 2


def test_minimize_finds_the_trainable_variables_of_a_graph() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():

        def step_fn() -> tf.Tensor:
            w = v1.get_variable("w", initializer=3.0)
            step = v1.train.get_or_create_global_step()
            optimizer = repl.wrap_optimizer(v1.train.AdamOptimizer(0.5))
            update = optimizer.minimize(w * (1.0 + repl.replica_id), global_step=step)
            with tf.control_dependencies([update]):
                return tf.stack(
                    [w.read_value(), tf.cast(step.read_value(), tf.float32)]
                )

        fetches = repl.run(step_fn)
        names = sorted(variable.name for variable in v1.global_variables())
        with helpers.monitored_session() as session:
            first = session.run(fetches)
            second = session.run(fetches)
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=3.0)
        step = v1.train.get_or_create_global_step()
        v1.train.AdamOptimizer(0.5).minimize(w * 1.5, global_step=step)
        assert names == sorted(variable.name for variable in v1.global_variables())
    np.testing.assert_allclose(first, [[2.5, 1], [2.5, 1]], rtol=1e-6)
    np.testing.assert_allclose(second, [[2.0, 2], [2.0, 2]], rtol=1e-6)
