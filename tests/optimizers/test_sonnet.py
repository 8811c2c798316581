# SPDX-License-Identifier: Apache-2.0
"""Sonnet 2 optimizers: apply(updates, parameters)."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf

from tests import helpers
from tests.optimizers import problem

CATALOGUE = {
    "SGD": lambda: snt.optimizers.SGD(0.1),
    "Momentum": lambda: snt.optimizers.Momentum(0.1, 0.9, use_nesterov=True),
    "Adam": lambda: snt.optimizers.Adam(0.1),
    "RMSProp": lambda: snt.optimizers.RMSProp(0.1, momentum=0.5, centered=True),
}


@functools.cache
def _plain(name: str) -> list[np.ndarray]:
    return problem.train_plain(problem.SONNET, CATALOGUE[name], problem.batches(3))


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", CATALOGUE)
def test_equals_plain_on_the_whole_batch(name: str, mode: str) -> None:
    actual = problem.train(
        helpers.make(2), problem.SONNET, CATALOGUE[name], problem.batches(3), mode
    )
    problem.assert_close(actual, _plain(name))
    assert np.max(np.abs(actual[1] - problem.MATRIX)) > 1e-4


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_made_inside_the_step(mode: str) -> None:
    actual = problem.train(
        helpers.make(3),
        problem.SONNET,
        CATALOGUE["Momentum"],
        problem.batches(3),
        mode,
        inside=True,
    )
    problem.assert_close(actual, _plain("Momentum"))


def test_learning_rate_may_be_a_variable_that_the_step_changes() -> None:
    repl = helpers.make(2)
    with repl.context():
        rate = tf.Variable(1.0, trainable=False)
        w = tf.Variable(10.0)
        optimizer = repl.wrap_optimizer(snt.optimizers.SGD(rate))

    def step_fn() -> None:
        optimizer.apply([tf.constant(1.0 + repl.replica_id)], [w])
        rate.assign(rate * 0.5)

    for _ in range(3):
        repl.run(step_fn)
    np.testing.assert_allclose(w.numpy(), 10 - 1.5 * (1 + 0.5 + 0.25), rtol=1e-6)
    helpers.assert_replicas_equal([w, rate])


def test_any_module_with_apply_is_taken() -> None:
    class Clipped(tf.Module):
        """Clips its gradients, which must be the combined ones."""

        def apply(
            self, updates: list[tf.Tensor], parameters: list[tf.Variable]
        ) -> None:
            for update, parameter in zip(updates, parameters, strict=True):
                parameter.assign_sub(tf.clip_by_value(update, -1.0, 1.0))

    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(0.0)
        optimizer = repl.wrap_optimizer(Clipped())
    # Clipped separately, replica 0 would pass 1 instead of 3: mean 0, not 1.
    repl.run(lambda: optimizer.apply([tf.constant([3.0, -1.0][repl.replica_id])], [w]))
    assert w.numpy() == -1.0


def test_takes_no_more_arguments_than_the_optimizer() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(snt.optimizers.SGD(1.0))
    gradient = tf.constant(1.0)
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4"):
        repl.run(lambda: optimizer.apply([gradient], [w], 0.5))
    repl.run(lambda: optimizer.apply([gradient], [w], weight=0.5))
    assert w.numpy() == 0.0
