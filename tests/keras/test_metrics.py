# SPDX-License-Identifier: Apache-2.0
"""Metrics count the examples of all replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras import worlds
from tests.keras.worlds import World, check, numbers

layers = keras.layers
X = numbers(0, 17, 8)
Y = np.eye(3)[np.random.default_rng(3).integers(0, 3, size=17)].astype("float32")


class Largest(keras.metrics.Metric):
    """The largest output so far, which is no sum."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(tf.maximum(self.value, tf.reduce_max(y_pred)))

    def result(self) -> Any:
        return self.value


class Everywhere(keras.metrics.Metric):
    """Counts updates, in a variable that is not summed over the replicas."""

    def __init__(self, name: str = "everywhere", mixed: bool = False) -> None:
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", aggregation="mean", name="count")
        if mixed:
            self.sum = self.add_weight(shape=(), initializer="zeros", name="sum")

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(1.0)

    def result(self) -> Any:
        return self.count + 0.0


class Both(keras.metrics.Metric):
    """Holds others, and has several results."""

    def __init__(self, name: str = "both") -> None:
        super().__init__(name=name)
        self.mean, self.recall = keras.metrics.Mean(), keras.metrics.Recall()

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.mean.update_state(tf.reduce_mean((y - y_pred) ** 2))
        self.recall.update_state(y, y_pred)

    def result(self) -> Any:
        return {"mse_of_batches": self.mean.result(), "recall": self.recall.result()}

    def reset_state(self) -> None:
        self.mean.reset_state()
        self.recall.reset_state()


def _spread(y: Any, y_pred: Any) -> Any:
    return tf.math.reduce_std(y_pred)


METRICS: dict[str, Any] = {
    "keras": lambda: [
        "accuracy",
        "mse",
        keras.metrics.AUC(),
        keras.metrics.F1Score(average="macro"),
        keras.metrics.Precision(),
        keras.metrics.R2Score(),
        keras.metrics.OneHotMeanIoU(3),
        keras.metrics.RootMeanSquaredError(),
        keras.metrics.CosineSimilarity(axis=0),
        keras.metrics.PearsonCorrelation(axis=0),
    ],
    "own": lambda: [Largest(), Everywhere(), Both(), _spread],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", METRICS)
def test_metrics(kind: str) -> None:
    def make() -> keras.Model:
        model = keras.Sequential([worlds.mlp(), layers.Softmax()])
        metric = METRICS[kind]()
        model.compile("sgd", "categorical_crossentropy", metrics=metric)
        return model

    class Batches(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.logs: list[Any] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.logs.append({name: np.array(value) for name, value in logs.items()})

    def program(world: World) -> Any:
        batches, model = Batches(), world.made(make)
        fit = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(X, Y, callbacks=[batches], **fit).history
        return history, batches.logs, model.evaluate(X, Y, 6, verbose=0)

    check(program, [2, 3])


class Trained(keras.Model):
    """Has its own step, which counts in every possible way."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)
        self.tracker = keras.metrics.Mean(name="tracked")
        self.largest = Largest()
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean((y - y_pred) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.tracker.update_state(loss)
        self.largest.update_state(y, y_pred)
        self.seen.update_state(tf.ones_like(y[:, 0]))
        return {
            "loss": self.tracker.result(),
            "largest": self.largest.result(),
            "seen": self.seen.result(),
            "now": loss,
        }


def test_metrics_of_a_step_of_its_own() -> None:
    def make() -> keras.Model:
        model = Trained()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    def program(world: World) -> Any:
        fit = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
        return world.made(make).fit(X, Y, **fit).history

    check(program)


class Vectors(keras.Model):
    """Metrics of one value per batch, and no scalar tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(4)
        self.mean = keras.metrics.Mean(name="features")
        self.twice = keras.metrics.Mean(name="twice")
        self.each = keras.metrics.Mean(name="each")
        self.parts = keras.metrics.Mean(name="parts")
        self.batches = keras.metrics.Sum(name="batches")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, _ = data
        y = self(x) + 1.0
        self.mean.update_state(tf.reduce_mean(y**2, 0))
        self.twice.update_state(tf.reduce_mean(y), sample_weight=2)
        self.each.update_state(tf.reduce_mean(y**2, 1))
        self.parts.update_state(tf.reshape(y**2, [-1]))
        self.batches.update_state(1)
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True], ids=["free", "fixed"])
def test_vectors_and_numbers_that_are_of_the_batch(fixed: bool) -> None:
    """Shards of 4 and 3 examples have 4 features, so one shard is as long as they."""

    def make() -> keras.Model:
        model = Vectors()
        model.compile("sgd")
        return model

    def program(world: World) -> Any:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(7, drop_remainder=fixed)
        return world.made(make).fit(data, verbose=0).history

    check(program, [2, 3])


def test_integers_and_largest_values_are_of_the_batch() -> None:
    class Step(Trained):
        def train_step(self, data: Any) -> Any:
            y = self(data[0])
            self.largest.update_state(0, y)
            rows = tf.shape(y)[0]
            return {"rows": rows, "first": tf.reduce_min(tf.argmax(y, 1)), "n": 2}

    def make() -> keras.Model:
        model = Step()
        model.compile("sgd")
        return model

    def program(world: World) -> Any:
        model = world.made(make)
        fit = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(X, Y, **fit).history, model.largest.value

    check(program, [2, 3])


def test_metrics_may_have_states_of_two_kinds() -> None:
    def make() -> keras.Model:
        return worlds.classifier(metrics=[Everywhere(mixed=True)])

    def program(world: World) -> Any:
        return world.made(make).fit(X, np.zeros(17), batch_size=7, verbose=0).history

    check(program, [2])
