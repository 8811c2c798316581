# SPDX-License-Identifier: Apache-2.0
"""steps_per_execution: several batches per call, in one loop of the graph."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicator.keras import executions, functions
from tests import helpers
from tests.keras.worlds import World, classifier, labels, numbers

layers = keras.layers
X, Y = numbers(0, 47, 8), labels(0, 47)
FIT: dict[str, Any] = {"epochs": 2, "verbose": 0, "shuffle": False}


def test_one_call_runs_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a batch that the replicas cannot divide is run by itself."""
    single, loop = functions.BatchFunction.run, executions._Loop.__call__
    calls: list[str] = []

    def run(self: Any, *given: Any) -> Any:
        calls.append("one")
        return single(self, *given)

    def several(self: Any, *given: Any) -> Any:
        calls.append("several")
        return loop(self, *given)

    monkeypatch.setattr(functions.BatchFunction, "run", run)
    monkeypatch.setattr(executions._Loop, "__call__", several)
    world = World(helpers.make(2))
    model = world.made(lambda: classifier(steps_per_execution=5))
    for _ in range(2):
        calls.clear()
        model.fit(X[:40], Y[:40], batch_size=2, **FIT)
        assert calls == ["several"] * 8
    assert int(model.optimizer.iterations) == 80
    calls.clear()  # of unknown size from here on; the twelfth has one example
    model.fit(X[:23], Y[:23], batch_size=2, **(FIT | {"epochs": 1}))
    assert calls == ["several"] * 3 + ["one", "several"]


def test_no_batch_is_the_end() -> None:
    world = World(helpers.make(2))
    model = world.made(lambda: classifier(steps_per_execution=3))
    model.make_train_function()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    iterator = iter(data.take(4))
    for _ in range(2):
        model.train_function(iterator)
    with pytest.raises(StopIteration):
        model.train_function(iterator)
    assert int(model.optimizer.iterations) == 4


@pytest.mark.parametrize("steps", [1, 3])
def test_an_error_amid_a_call_leaves_replicas_equal(steps: int) -> None:
    """The batches before it are complete; the replicas' variables stay equal."""

    def make() -> keras.Model:
        table = layers.Embedding(4, 3)
        model = keras.Sequential([layers.Input((1,), dtype="int32"), table])
        model.add(layers.Flatten())
        model.compile("adam", "mse", steps_per_execution=steps)
        return model

    model = World(helpers.make(2, variables="mirrored")).made(make)
    x = np.ones([12, 1], "int32")
    y = numbers(1, 12, 3)
    model.fit(x, y, batch_size=2, **FIT)
    before = int(model.optimizer.iterations)
    x[9] = 7  # no row of the table, in the last execution's second batch
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(x, y, batch_size=2, **FIT)
    assert int(model.optimizer.iterations) == before + 4
    variables = [v.value for v in (*model.weights, *model.optimizer.variables)]
    helpers.assert_replicas_equal(variables)
