# SPDX-License-Identifier: Apache-2.0
"""run_eagerly: whole batches on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from replicator.errors import ContextError
from tests import helpers
from tests.keras import worlds
from tests.keras.worlds import World, check, classifier, labels, numbers

layers = keras.layers
X, Y = numbers(0, 17, 8), labels(0, 17)
FIT: dict[str, Any] = {"epochs": 2, "batch_size": 7, "verbose": 0, "shuffle": False}


class Seen:
    """Values inspected while a model runs eagerly."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def note(self, tensor: Any) -> None:
        """Notes a value, if there is one; a graph's tensors have none."""
        if not tf.is_symbolic_tensor(tensor):
            self.values.append(float(np.sum(tensor.numpy())))


class Largest(keras.metrics.Metric):
    """The largest output so far, inspected."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(name="largest")
        self.seen = seen
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.note(y_pred)
        self.value.assign(tf.maximum(self.value, tf.reduce_max(y_pred)))

    def result(self) -> Any:
        return self.value


class Looking(keras.Model):
    """Inspects values where users do: in call, train_step, the loss and a metric."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.embedding = layers.Embedding(10, 4)
        self.hidden = layers.Dense(16, activation="relu")
        self.norm = layers.BatchNormalization(synchronized=True)
        self.dropout = layers.Dropout(0.3, seed=5)
        self.outputs_ = layers.Dense(3, activation="softmax")

    def call(self, x: Any, training: bool = False) -> Any:
        codes = tf.cast(tf.clip_by_value(tf.abs(x) * 3, 0, 9), tf.int32)
        h = tf.concat([x, tf.reduce_mean(self.embedding(codes), 1)], 1)
        h = self.norm(self.hidden(h), training=training)
        self.seen.note(h)
        # The numbers only agree in each world if everything runs on one device.
        h = self.dropout(h, training=training and self.run_eagerly)
        return self.outputs_(h)

    def train_step(self, data: Any) -> Any:
        self.seen.note(data[0])
        return super().train_step(data)


def _looking(seen: Seen, optimizer: Any = None, **options: Any) -> keras.Model:
    def loss(y: Any, y_pred: Any) -> Any:
        seen.note(y_pred)
        return keras.losses.sparse_categorical_crossentropy(y, y_pred)

    model = Looking(seen)
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    metrics = ["accuracy", Largest(seen)]
    model.compile(optimizer, loss, metrics=metrics, run_eagerly=True, **options)
    return model


@pytest.mark.parametrize(
    "num_replicas, variables",
    [
        (2, "sharded"),
        pytest.param(3, "sharded", marks=pytest.mark.slow),
        pytest.param(1, "sharded", marks=pytest.mark.slow),
        pytest.param(3, "mirrored", marks=pytest.mark.slow),
    ],
)
def test_run_eagerly_is_eager_and_goes_on_as_keras_does(
    num_replicas: int, variables: str
) -> None:
    def program(world: World) -> Any:
        seen = Seen()
        model = world.made(lambda: _looking(seen))
        fit = FIT | {"validation_data": (X[:4], Y[:4])}
        results = [model.fit(X, Y, **fit).history, model.get_weights()]
        looked = list(seen.values)
        assert len(looked) > 4 * 6
        results += [model.predict(X, 7, verbose=0), looked]
        model.run_eagerly = False
        for name in "train", "test", "predict":
            getattr(model, f"make_{name}_function")(force=True)
        return [*results, model.fit(X, Y, **fit).history, model.get_weights()]

    check(program, [num_replicas], variables=variables)


@pytest.mark.slow
@pytest.mark.parametrize("eager", ["always", "first", "later"])
def test_accumulated_gradients(eager: str) -> None:
    """Sums continue from eager steps to other steps, and back."""

    def program(world: World) -> Any:
        def make() -> keras.Model:
            if not world.repl:
                optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            else:
                optimizer = keras.optimizers.SGD(0.1)
                optimizer = world.repl.wrap_optimizer(optimizer, accumulation_steps=2)
            table = layers.Embedding(10, 4)
            model = keras.Sequential(
                [layers.Input((3,), dtype="int32"), table, layers.Flatten()]
            )
            model.add(layers.Dense(3, activation="softmax"))
            model.compile(optimizer, worlds.SPARSE)
            return model

        model = world.made(make)
        x = np.arange(51).reshape(17, 3) % 10
        results = []
        for eagerly in {"always": [1, 1], "first": [1, 0], "later": [0, 1]}[eager]:
            model.run_eagerly = bool(eagerly)
            model.make_train_function(force=True)
            results.append(model.fit(x, Y, **FIT).history)  # of three batches
        return results, model.get_weights()

    check(program, [2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_execution": 2},
        {"optimizer": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1)},
        {"optimizer": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2)},
        {"optimizer": lambda: keras.optimizers.Adam(use_ema=True, ema_momentum=0.5)},
        {"auto_scale_loss": True, "optimizer": lambda: keras.optimizers.RMSprop(0.01)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_run_eagerly_with_what_compile_takes(options: dict[str, Any]) -> None:
    def program(world: World) -> Any:
        def make() -> keras.Model:
            arguments = {k: v() if k == "optimizer" else v for k, v in options.items()}
            return _looking(Seen(), **arguments)

        model = world.made(make)
        return model.fit(X, Y, **FIT).history, model.get_weights()

    check(program, [2])


def test_run_eagerly_warns_once_that_it_is_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[Any] = []
    monkeypatch.setattr(logging, "log_first_n", lambda *given: messages.append(given))
    monkeypatch.setattr(logging, "warning", lambda *given: messages.append(given))
    for num_replicas in 1, 2:
        world = World(helpers.make(num_replicas))
        model = world.made(lambda: classifier(run_eagerly=True))
        model.train_on_batch(X, Y)
        assert len(messages) == num_replicas - 1
    assert "for debugging" in messages[0][1] and "run_eagerly=False" in messages[0][1]


class Communicating(keras.Model):
    """Communicates in its step or its call."""

    def __init__(self, repl: Any, where: str) -> None:
        super().__init__()
        self.repl, self.where, self.dense = repl, where, layers.Dense(1)

    def call(self, x: Any) -> Any:
        if self.where == "call":
            self.repl.all_reduce(tf.reduce_mean(x))
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        if self.where == "train_step":
            self.repl.all_reduce(tf.reduce_mean(data[0]))
        return super().train_step(data)


@pytest.mark.parametrize("where", ["call", "train_step"])
@pytest.mark.parametrize("eager", [True, False])
def test_communication_is_refused(eager: bool, where: str) -> None:
    def make() -> keras.Model:
        model = Communicating(repl, where)
        model.compile("sgd", "mse", run_eagerly=eager)
        return model

    repl = helpers.make(2)
    model = World(repl).made(make)
    with pytest.raises(
        ContextError,
        match="(?s)^all_reduce was called in train_step of the model .*for one device.*"
        f"  at .*test_alone.py:.* in {where}\nFix: leave all_reduce out",
    ):
        model.fit(X[:4], np.zeros([4, 1]), verbose=0)
