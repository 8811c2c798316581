# SPDX-License-Identifier: Apache-2.0
"""Strategies in all ways of running: fit, several steps per call, lazy variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.strategy import PS, Mirrored, PartitionedPS, RandomAxisPartitionAR
from tests import helpers


@pytest.mark.parametrize("builder", [lambda: PS(True), PartitionedPS])
def test_fit_is_that_without_a_strategy(builder: Any) -> None:
    x = np.random.RandomState(0).randn(12, 6).astype(np.float32)
    losses = []
    for strategy in (None, builder()):
        repl = helpers.make(3, strategy=strategy)
        with repl.context():
            tf.keras.utils.set_random_seed(0)
            model = tf.keras.Sequential(
                [
                    tf.keras.Input([6]),
                    tf.keras.layers.Dense(4),
                    tf.keras.layers.Dense(1),
                ]
            )
            optimizer = tf.keras.optimizers.Adam(0.1, clipnorm=1.0)
            model.compile(optimizer=optimizer, loss="mse")
        repl.keras_model(model)
        y = x.sum(1, keepdims=True)
        history = model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.parametrize(
    "builder", [lambda: PS(True), lambda: PartitionedPS(True), RandomAxisPartitionAR]
)
def test_several_steps_in_a_call(builder: Any) -> None:
    results = []
    for strategy in (None, builder()):
        repl = helpers.make(2, strategy=strategy)
        with repl.context():
            v = tf.Variable([[1.0, 2.0], [3.0, 4.0]], name="v")
            optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9))

        def step_fn(repl: Any = repl, v: Any = v, optimizer: Any = optimizer) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(v * v) * (1.0 + repl.replica_id)
            optimizer.apply([tape.gradient(loss, v)], [v])
            return loss

        losses = repl.run(step_fn, steps_per_call=3)
        results.append([losses[0].numpy(), losses[1].numpy(), v.numpy()])
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_variables_that_a_step_makes_have_paths_of_their_own() -> None:
    repl = helpers.make(2, strategy={"kernel": PS(), "bias": Mirrored()})
    created: list[Any] = []

    def step_fn() -> Any:
        if not created:
            created.append(tf.keras.layers.Dense(2, name="lazy"))
        return created[0](tf.ones([1, 3]))

    repl.run(step_fn)
    (layer,) = created
    assert list(repl.strategy.by_name) == [v.path for v in layer.variables]
    assert [v.value.owner for v in layer.variables] == [0, None]
