# SPDX-License-Identifier: Apache-2.0
"""Programs of fit: losses and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.keras.fits import FIT, X, compiled, fitted, program
from tests.keras.worlds import World, classifier, labels, mlp, numbers

layers, ops = keras.layers, keras.ops
SGD = keras.optimizers.SGD
Y = numbers(1, 23, 3)
WEIGHTS = np.linspace(0.1, 2.0, 23)


def descended(model: Any, tape: Any, loss: Any) -> None:
    weights = model.trainable_variables
    pairs = zip(tape.gradient(loss, weights), weights, strict=True)
    model.optimizer.apply_gradients(pairs)


class Dense(keras.Model):
    """A dense layer, and what a subclass computes of it."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)


# --- Losses ---------------------------------------------------------------------------


def _sum_of_squares(y: Any, y_pred: Any) -> Any:
    return tf.reduce_sum((y - y_pred) ** 2)


def _contrastive(y: Any, y_pred: Any) -> Any:
    """Compares each example with all others of its batch."""
    likeness = tf.matmul(y_pred, y, transpose_b=True)
    return keras.losses.sparse_categorical_crossentropy(
        tf.range(tf.shape(y)[0]), likeness, from_logits=True
    )


class _Quantile(keras.losses.Loss):
    def call(self, y: Any, y_pred: Any) -> Any:
        error = y - y_pred
        return tf.reduce_mean(tf.maximum(0.3 * error, -0.7 * error), -1)


@program(
    cases={
        "str": "mse",
        "mean": keras.losses.Huber(),
        "sum": keras.losses.MeanSquaredError(reduction="sum"),
        "weighted": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        "across": keras.losses.Dice(),
        "function": _sum_of_squares,
        "contrastive": _contrastive,
        "own": _Quantile(),
    },
    in_gate=["contrastive"],
)
def a_loss(world: World, case: Any) -> Any:
    make = compiled(mlp, lambda: SGD(0.01), case)
    return fitted(world, make, X, Y, sample_weight=WEIGHTS)


@program(3, in_gate=True)
def a_loss_along_the_batch(world: World) -> Any:
    make = compiled(mlp, "sgd", keras.losses.CosineSimilarity(axis=0))
    return fitted(world, make, X, Y)


@program(
    cases={
        "a mean": {"reduction": "sum_over_batch_size"},
        "a sum": {"reduction": "sum"},
        "compiled": {"jit_compile": True},
    }
)
def masks(world: World, case: dict[str, Any]) -> Any:
    lengths = 1 + np.arange(23)[:, None] % 5
    x = np.where(np.arange(5) < lengths, 1 + np.arange(5), 0)
    y, how = labels(2, 23 * 5, 4).reshape(23, 5), dict(case)

    is_compiled = how.pop("jit_compile", False)

    def make() -> keras.Model:
        rnn = layers.SimpleRNN(4, return_sequences=True)
        dense = layers.Dense(4, activation="softmax")
        between = [] if is_compiled else [rnn]
        embedding = layers.Embedding(7, 4, mask_zero=True)
        return keras.Sequential([embedding, *between, dense])

    loss = keras.losses.SparseCategoricalCrossentropy(**how)
    how = {"metrics": ["accuracy"], "jit_compile": is_compiled}
    made = compiled(make, lambda: SGD(0.05), loss, **how)
    return fitted(world, made, x, y)


@program(in_gate=True)
def several_losses(world: World) -> Any:
    def make() -> keras.Model:
        inputs = layers.Input((8,))
        model = keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(2)(inputs)])
        model.compile(SGD(0.05), ["mse", "mae"], loss_weights=[1, 0.2])
        return model

    return fitted(world, make, X, [Y, numbers(5, 23, 2)])


class Flat(keras.Model):
    """Returns a number per example, of shape [examples]."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1, "sigmoid")

    def call(self, x: Any) -> Any:
        return tf.squeeze(self.dense(x), -1)


@program(cases={"mse": "mse", "kl_divergence": "kl_divergence"}, in_gate=True)
def numbers_per_example(world: World, case: str) -> Any:
    """Keras reduces the last axis, which here is the batch."""
    make = compiled(Flat, lambda: SGD(0.05), case, metrics=["mae", "accuracy"])
    y, weights = labels(2, 23, 2).astype("float32"), numbers(3, 23) ** 2
    return fitted(world, make, X, y, sample_weight=weights)


class Adding(layers.Layer):
    """Adds a loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(x**2))
        return x


@program()
def regularization_and_added_losses(world: World) -> Any:
    def make() -> keras.Model:
        regular = {"kernel_regularizer": "l2", "activity_regularizer": "l1"}
        inside = [layers.Dense(8, **regular), Adding(), layers.Dense(3)]
        return keras.Sequential(inside)

    return fitted(world, compiled(make, lambda: SGD(0.05), "mse"), X, Y)


class Spread(Dense):
    """Computes a loss of its own, with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True
    ) -> Any:
        spread = tf.math.reduce_std(y_pred) + tf.reduce_max(x)
        return tf.reduce_sum((y - y_pred) ** 2) * self.scale + spread


@program()
def a_loss_that_a_model_computes(world: World) -> Any:
    return fitted(world, compiled(Spread, lambda: SGD(0.001)), X, Y)


class OwnArguments(Dense):
    """Compares examples, by a compute_loss with its own arguments."""

    by_names = False

    def compute_loss(self, one: Any, other: Any, scale: float = 1.0) -> Any:
        return scale * tf.reduce_mean(tf.nn.softmax(one @ tf.transpose(other)) ** 2)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            if self.by_names:
                loss = self.compute_loss(other=y, one=z, scale=2.0)
            else:
                loss = self.compute_loss(z, y)
        descended(self, tape, loss)
        return {"loss": loss}


@program(cases={"positions": False, "names": True}, in_gate=["names"])
def compute_loss_with_arguments_of_its_own(world: World, case: bool) -> Any:
    model = world.made(compiled(type("Own", (OwnArguments,), {"by_names": case})))
    return model.fit(X, Y, **FIT).history, model.get_weights()


class Constant(keras.Model):
    """Predicts the same, whatever its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = self.add_weight(shape=(1, 3), initializer="zeros", name="mean")

    def compute_loss(
        self, x: Any = None, y: Any = None, *given: Any, **more: Any
    ) -> Any:
        return ops.mean((y - self.mean) ** 2)

    def call(self, x: Any) -> Any:
        return tf.sparse.to_dense(x)


@program()
def sparse_inputs_that_a_loss_leaves_out(world: World) -> Any:
    slices = tf.data.Dataset.from_tensor_slices
    data, model = slices((tf.sparse.from_dense(X), Y)).batch(5), compiled(Constant)
    model = world.made(model)
    return model.fit(data, epochs=2, verbose=0).history, model.get_weights()


# --- Metrics --------------------------------------------------------------------------


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


METRICS: dict[str, Callable[[], list[Any]]] = {
    "of keras": lambda: [
        *("accuracy", "mse", keras.metrics.AUC(), keras.metrics.Precision()),
        *(keras.metrics.F1Score(average="macro"), keras.metrics.R2Score()),
        *(keras.metrics.OneHotMeanIoU(3), keras.metrics.RootMeanSquaredError()),
        keras.metrics.CosineSimilarity(axis=0),
        keras.metrics.PearsonCorrelation(axis=0),
    ],
    "of the user": lambda: [Largest(), Everywhere(), Both(), _spread],
    "of two kinds of states": lambda: [Everywhere(mixed=True)],
}


def _spread(y: Any, y_pred: Any) -> Any:
    return tf.math.reduce_std(y_pred)


@program(cases=METRICS, in_gate=["of two kinds of states"])
def metrics(world: World, case: Callable[[], list[Any]]) -> Any:
    seen: list[Any] = []

    def note(batch: int, logs: Any) -> None:
        seen.append({name: np.array(value) for name, value in logs.items()})

    loss = "categorical_crossentropy"
    model = world.made(lambda: classifier(loss=loss, optimizer="sgd", metrics=case()))
    noting = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    y = np.eye(3)[labels(3, 23)].astype("float32")
    history = model.fit(X, y, callbacks=[noting], **FIT).history
    return history, seen, model.evaluate(X, y, 6, verbose=0)


class Trained(Dense):
    """Has its own step, which counts in every possible way."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="tracked")
        self.largest = Largest()
        self.seen = keras.metrics.Sum(name="seen")

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
            "rows": tf.shape(y)[0],
            "first": tf.reduce_min(tf.argmax(y_pred, 1)),
            "n": 2,
        }


@program(1, 2, 3, in_gate=True)
def metrics_of_a_step_of_its_own(world: World) -> Any:
    model = world.made(compiled(Trained))
    return model.fit(X, Y, **FIT).history, model.largest.value


class Vectors(keras.Model):
    """Metrics of one value per batch, and no scalar tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(4)
        names = ("features", "twice", "each", "parts")
        self.means = [keras.metrics.Mean(name=name) for name in names]
        self.batches = keras.metrics.Sum(name="batches")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        y = self(data[0]) + 1.0
        features, twice, each, parts = self.means
        features.update_state(tf.reduce_mean(y**2, 0))
        twice.update_state(tf.reduce_mean(y), sample_weight=2)
        each.update_state(tf.reduce_mean(y**2, 1))
        parts.update_state(tf.reshape(y**2, [-1]))
        self.batches.update_state(1)
        return {one.name: one.result() for one in (*self.means, self.batches)}


@program(2, 3, cases={"free": False, "fixed": True})
def vectors_and_numbers_of_the_batch(world: World, case: bool) -> Any:
    """Shards of 4 and 3 examples have 4 features, so one shard is as long as they."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(7, drop_remainder=case)
    return world.made(compiled(Vectors)).fit(data, verbose=0).history


class Inner(Dense):
    """A model with its own metric, which the outer one does not list."""

    def __init__(self) -> None:
        super().__init__()
        self.size = keras.metrics.Mean()

    def call(self, x: Any) -> Any:
        y = self.dense(x)
        self.size.update_state(tf.reduce_mean(y))
        return y


class Outer(keras.Model):
    """Reports a metric of a model inside a model inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "size": self.inner.size.result()}


@program(in_gate=True)
def metrics_that_a_model_does_not_list(world: World) -> Any:
    return world.made(compiled(Outer)).fit(X, Y, **FIT).history
