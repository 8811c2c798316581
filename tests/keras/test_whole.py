# SPDX-License-Identifier: Apache-2.0
"""Programs whose steps are not sums over examples compute the numbers of one device."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import replicator
from tests.keras.worlds import World, check, numbers

layers, ops = keras.layers, keras.ops
X, Y = numbers(0, 23, 5), numbers(1, 23, 3)


def _updated(model: Any, tape: Any, loss: Any) -> None:
    weights = model.trainable_variables
    gradients = tape.gradient(loss, weights)
    model.optimizer.apply_gradients(zip(gradients, weights, strict=True))


class Clipped(keras.Model):
    """Clips by the global norm."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "norm": norm}


class Contrastive(keras.Model):
    """Adds a term across the examples to compute_loss, and logs what is no mean."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.compute_loss(x, y, p)
            loss += 0.1 * ops.mean(ops.logsumexp(p @ ops.transpose(p), 1))
        _updated(self, tape, loss)
        return {
            "root": ops.sqrt(loss),
            "worst": ops.max(ops.abs(y - p)),
            "step": self.optimizer.iterations,
        }

    def test_step(self, data: Any) -> Any:
        x, y = data
        return {"root": ops.sqrt(ops.mean((self(x) - y) ** 2))}


class PerExample(keras.Model):
    """Differentiates one loss per example."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss(y, self(x, training=True))
        _updated(self, tape, loss)
        return {"loss": ops.mean(loss)}


class Measured(keras.Model):
    """Updates metrics in compute_loss."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.positives = keras.metrics.TruePositives(name="positives")
        self.mean = keras.metrics.Mean(name="mean")
        self.sum = keras.metrics.Sum(name="sum")

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        errors = ops.mean((y - y_pred) ** 2, -1)
        self.positives.update_state(y > 0, ops.sigmoid(y_pred))
        self.mean.update_state(errors)
        self.sum.update_state(errors)
        return ops.mean(errors)


class Hidden(keras.Model):
    """Has a metric that is no attribute, and a Sum of means."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        root = keras.metrics.RootMeanSquaredError()
        self.hidden = types.SimpleNamespace(root=root)
        self.total = keras.metrics.Sum(name="total")

    def train_step(self, data: Any) -> Any:
        logs, (x, y) = super().train_step(data), data
        self.hidden.root.update_state(y, self(x))
        self.total.update_state(ops.mean((self(x) - y) ** 2))
        root, total = self.hidden.root.result(), self.total.result()
        return {**logs, "root": root, "total": total}


class Memory(layers.Layer):
    """Keeps the last four examples, counts all, and adds a sum to the losses."""

    def build(self, shape: Any) -> None:
        def weight(*shape: int) -> Any:
            return self.add_weight(shape=shape, initializer="zeros", trainable=False)

        self.bank, self.seen, self.mean = weight(4, shape[-1]), weight(), weight(5)

    def call(self, x: Any) -> Any:
        self.bank.assign(ops.concatenate([self.bank.value, x])[-4:])
        self.seen.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        self.mean.assign(0.9 * self.mean + 0.1 * ops.sum(x, 0))
        self.add_loss(0.01 * ops.sum(x**2))
        return x + 0.1 * ops.mean(self.bank.value)


class Crossing(layers.Layer):
    """Mixes the examples of a batch."""

    def call(self, x: Any) -> Any:
        likeness = ops.softmax(x @ ops.transpose(x))
        return x + 0.1 * ops.tensordot(likeness, x, [[1], [0]])


def _made(kind: type[keras.Model], *middle: Callable[[], Any]) -> Any:
    x = h = keras.Input((5,))
    for layer in middle:
        h = layer()(h)
    model = kind(x, layers.Dense(3)(h))
    loss = keras.losses.mean_absolute_error if kind is PerExample else "mse"
    model.compile(keras.optimizers.SGD(0.05), loss)
    return model


def _results(model: Any, x: Any = X, y: Any = Y, batch_size: int = 6) -> Any:
    fit = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, **fit).history
    return history, model.evaluate(x, y, batch_size, verbose=0), model.get_weights()


PROGRAMS: dict[str, Callable[[], Any]] = {
    "clipping": lambda: _made(Clipped),
    "a term across examples": lambda: _made(Contrastive),
    "a loss per example": lambda: _made(PerExample),
    "metrics in compute_loss": lambda: _made(Measured),
    "hidden metrics": lambda: _made(Hidden),
    "a memory": lambda: _made(keras.Model, Memory),
    "batch normalization": lambda: _made(keras.Model, layers.BatchNormalization),
    "a layer across examples": lambda: _made(keras.Model, Crossing),
}
QUICK = ("clipping", "hidden metrics")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in PROGRAMS
    ],
)
def test_programs(name: str) -> None:
    check(lambda world: _results(world.made(PROGRAMS[name])), [2, 3], tolerance=2e-5)


class Distiller(keras.Model):
    """Learns what a teacher says."""

    def __init__(self, teacher: Any) -> None:
        super().__init__()
        self.teacher, self.student = teacher, layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.student(x) - self.teacher(x)


def test_teachers_may_come_from_outside() -> None:
    def program(world: World) -> Any:
        keras.utils.set_random_seed(2)
        teacher = keras.Sequential([keras.Input([5]), layers.Dense(3)])
        teacher.compile("sgd", "mse")
        teacher.fit(X, Y, verbose=0, shuffle=False)
        teacher.trainable = False

        def make() -> Any:
            model = Distiller(teacher)
            model.compile("sgd", "mse")
            return model

        return _results(world.made(make))

    check(program, [2])


def test_what_is_made_outside_is_not_written() -> None:
    trained = layers.Dense(3)
    trained.build([None, 5])
    world = World(replicator.Replicator(["CPU:0", "CPU:1"]))

    def make() -> Any:
        model = keras.Sequential([keras.Input([5]), layers.Dense(5), trained])
        model.compile("sgd", "mse")
        return model

    model = world.made(make)
    model.predict(X, verbose=0)
    with pytest.raises(
        replicator.ContextError,
        match="(?s)created outside of the context is written.*Fix",
    ):
        model.fit(X, Y, verbose=0)


@pytest.mark.slow
def test_saved_models_as_layers(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path / "saved")
    saved = keras.Sequential([keras.Input([5]), layers.Dense(4)])
    saved.export(folder, verbose=False)

    def program(world: World) -> Any:
        outside = layers.TFSMLayer(folder, call_endpoint="serve", trainable=False)

        def make(inside: bool) -> Any:
            layer = outside
            if inside:
                layer = layers.TFSMLayer(folder, call_endpoint="serve")
            model = keras.Sequential([keras.Input([5]), layer, layers.Dense(3)])
            model.compile("sgd", "mse")
            return model

        return [_results(world.made(lambda i=i: make(i))) for i in (False, True)]

    check(program, [2])


@pytest.mark.slow
def test_graphs_are_batches() -> None:
    """Of which the adjacency has a second axis of as many nodes."""

    class Convolution(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, graph: Any) -> Any:
            return self.dense(tf.matmul(graph["adjacency"], graph["nodes"]))

    def make() -> Any:
        model = Convolution()
        model.compile("sgd", "mse")
        return model

    graph = {"adjacency": numbers(4, 23, 23), "nodes": X}
    check(lambda world: _results(world.made(make), graph, Y, 23), [2])
