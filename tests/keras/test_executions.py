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
from tests.keras import worlds
from tests.keras.worlds import World, check, classifier, labels, numbers

layers = keras.layers
X, Y = numbers(0, 47, 8), labels(0, 47)
FIT: dict[str, Any] = {"epochs": 2, "verbose": 0, "shuffle": False}


class Batches(keras.callbacks.Callback):
    """Notes the batches that callbacks see, in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, dict(sorted(logs.items()))))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, dict(sorted(logs.items()))))


def _trained(world: World, x: Any = X, y: Any = Y, steps: int = 3, **fit: Any) -> Any:
    batches = Batches()
    model = world.made(lambda: classifier(steps_per_execution=steps))
    history = model.fit(x, y, callbacks=[batches], **(FIT | fit)).history
    return history, batches.seen, model.get_weights(), int(model.optimizer.iterations)


@pytest.mark.parametrize("batch_size", [6, pytest.param(5, marks=pytest.mark.slow)])
def test_any_sizes(batch_size: int) -> None:
    """The last batch is uneven, or too small for all replicas, inside a call."""
    data = (X[:13], Y[:13])

    def program(world: World) -> Any:
        rows = 43 if batch_size == 6 else 46  # the last: one example
        fit = {"batch_size": batch_size, "validation_data": data}
        return _trained(world, X[:rows], Y[:rows], **fit)

    check(program, [2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fit",
    [
        {"steps": 100},
        {"steps": 2, "steps_per_epoch": 3},
        {"steps": 4, "batch_size": 7, "validation_split": 0.4},
        {"steps": 3, "sample_weight": np.linspace(0.0, 2.0, 47)},
    ],
    ids=lambda fit: "-".join(fit),
)
def test_what_fit_takes(fit: dict[str, Any]) -> None:
    check(lambda world: _trained(world, **({"batch_size": 8} | fit)), [2])


@pytest.mark.slow
def test_sizes_that_change() -> None:
    """Batches of all kinds in any order, static sizes, and other sizes later."""
    sizes = [4, 4, 1, 6, 5, 5, 5, 5, 5, 2, 3, 2]
    starts = np.cumsum([0, *sizes])

    def generator() -> Any:
        for start, size in zip(starts, sizes, strict=False):
            yield X[start : start + size], Y[start : start + size]

    def program(world: World) -> Any:
        model = world.made(lambda: classifier(steps_per_execution=4))
        spec = (tf.TensorSpec([None, 8]), tf.TensorSpec([None], tf.int64))
        data = tf.data.Dataset.from_generator(generator, output_signature=spec)
        results = [model.fit(data, **FIT).history]
        for size in 5, 6:
            results.append(model.fit(X, Y, batch_size=size, **FIT).history)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6, drop_remainder=True)
        results += [model.fit(data, **FIT).history, model.evaluate(data, verbose=0)]
        return results, model.get_weights()

    check(program, [2, 3])


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


class Own(keras.Model):
    """Logs values whose shape is unknown in advance."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        size = 1 + tf.cast(self.optimizer.iterations * 0, tf.int32)
        return logs | {"free": tf.ones([size]), "none": None, "number": 2.0}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: classifier(steps_per_execution=3, jit_compile=True),
            marks=pytest.mark.slow,
        ),
        Own,
    ],
    ids=["compiled", "free"],
)
def test_steps_of_other_kinds(make: Any) -> None:
    def program(world: World) -> Any:
        def made() -> keras.Model:
            model = make()
            if isinstance(model, Own):
                model.compile("sgd", worlds.SPARSE, steps_per_execution=3)
            return model

        model = world.made(made)
        seen: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])
        )
        model.fit(X, Y, batch_size=6, callbacks=[note], **FIT)
        return seen, model.get_weights()

    check(program, [2])


@pytest.mark.slow
def test_ragged_batches_run_one_by_one() -> None:
    class OfRagged(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.dense = layers.Embedding(20, 4), layers.Dense(1)

        def call(self, x: Any) -> Any:
            rows = self.embedding(x.to_tensor(shape=[None, 4]))
            return self.dense(tf.reduce_mean(rows, 1))

    x = tf.ragged.constant([list(range(1, 2 + i % 4)) for i in range(11)], tf.int64)
    data = tf.data.Dataset.from_tensor_slices((x, numbers(1, 11, 1))).batch(2)

    def program(world: World) -> Any:
        def make() -> keras.Model:
            model = OfRagged()
            model.compile("sgd", "mse", steps_per_execution=3)
            return model

        return world.made(make).fit(data, **FIT).history

    check(program, [2])


def test_no_batch_is_the_end_and_bad_batches_are_refused_as_ever() -> None:
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

    def generator() -> Any:
        yield X[:4], Y[:4]
        yield X[:4], Y[:2]

    bad = tf.data.Dataset.from_generator(generator, output_signature=data.element_spec)
    with pytest.raises(ValueError, match="(?s)differ in their first dimension.*Fix"):
        model.train_function(iter(bad))
    assert int(model.optimizer.iterations) == 5


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
