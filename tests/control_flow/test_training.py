# SPDX-License-Identifier: Apache-2.0
"""Several training steps inside one loop equal the same steps one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers

STEPS = 4
_random = np.random.RandomState(0)
XS = _random.randn(2, STEPS, 8, 5).astype(np.float32)  # [replicas, steps, ...]
YS = _random.randn(2, STEPS, 8, 1).astype(np.float32)

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(0.1, clipnorm=1.0),
}


def _loss(weights: Any, r: int, n: tf.Tensor) -> tf.Tensor:
    x, y = tf.gather(XS[r], n), tf.gather(YS[r], n)
    return tf.reduce_mean((tf.matmul(x, weights) - y) ** 2)


def _train(name: str, in_a_loop: bool, mode: str = "eager") -> list[np.ndarray]:
    """Returns the losses, the weights and the optimizer's variables."""
    repl = helpers.make(2)
    with repl.context():
        weights = tf.Variable(tf.ones([5, 1]))
        optimizer = repl.wrap_optimizer(OPTIMIZERS[name]())
        optimizer.build([weights])

    def one(n: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = _loss(weights, repl.replica_id, n)
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
        return repl.all_reduce(loss, "mean")

    def turn(n: tf.Tensor, losses: Any) -> tuple[tf.Tensor, Any]:
        return n + 1, losses.write(n, one(n))

    def loop() -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, STEPS)
        return tf.while_loop(lambda n, _: n < STEPS, turn, [helpers.opaque(0), losses])[
            1
        ].stack()

    if in_a_loop:
        losses = helpers.run(mode, repl, lambda: loop)[0]
    else:
        numbers = iter(range(STEPS))
        step = repl.build(
            one, lambda: tf.data.Dataset.range(2 * STEPS).map(lambda k: k // 2)
        )
        losses = np.array([float(step()[0]) for _ in numbers])
    helpers.assert_replicas_equal([weights, *optimizer.variables])
    return [losses, weights.numpy(), *(v.numpy() for v in optimizer.variables)]


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_a_loop_equal_steps_one_by_one(name: str, mode: str) -> None:
    got, want = _train(name, True, mode), _train(name, False)
    assert len(got) > 3
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_steps_in_a_loop_of_a_session() -> None:
    v1 = tf.compat.v1

    def make(repl: Any, in_a_loop: bool) -> Callable[[], Callable[[], Any]]:
        def make_step() -> Callable[[], Any]:
            weights = tf.Variable(tf.ones([5, 1]))
            count = tf.Variable(0)
            optimizer = repl.wrap_optimizer(v1.train.MomentumOptimizer(0.1, 0.9))

            def one(n: tf.Tensor) -> tf.Tensor:
                loss = _loss(weights, repl.replica_id, n)
                update = optimizer.apply_gradients(
                    [(tf.gradients(loss, weights)[0], weights)]
                )
                with tf.control_dependencies([update]):
                    return tf.identity(loss)

            def step() -> Any:
                if not in_a_loop:
                    one(count.read_value())
                    count.assign_add(1)
                else:
                    tf.while_loop(
                        lambda n: n < STEPS,
                        lambda n: (n + 1 + tf.cast(0.0 * one(n), tf.int32),),
                        [helpers.opaque(0)],
                    )
                return weights.read_value()

            return step

        return make_step

    repl = helpers.make(2)
    got = helpers.run("session", repl, make(repl, True))
    want = helpers.run("session", repl, make(repl, False), steps=STEPS)
    for one in got:
        np.testing.assert_allclose(one, want[0], rtol=1e-5)
