# SPDX-License-Identifier: Apache-2.0
"""Programs of fit: steps that are not sums over examples, and scales of losses."""

from __future__ import annotations

import pathlib
import tempfile
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.keras.fits import FIT, X, compiled, fitted, program
from tests.keras.losses import Dense, descended
from tests.keras.worlds import World, classifier, labels, numbers

layers, ops = keras.layers, keras.ops
SGD = keras.optimizers.SGD
Y = numbers(1, 23, 3)


# --- Steps that are not sums over examples --------------------------------------------


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
        descended(self, tape, loss)
        worst = ops.max(ops.abs(y - p))
        return {
            "root": ops.sqrt(loss),
            "worst": worst,
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
            loss = keras.losses.mean_absolute_error(y, self(x, training=True))
        descended(self, tape, loss)
        return {"loss": ops.mean(loss)}


class Measured(keras.Model):
    """Updates metrics in compute_loss, and logs what is no mean."""

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

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        norm = ops.sqrt(ops.sum((y - y_pred) ** 2))
        return {**found, "norm": norm, "worst": ops.max(ops.abs(y - y_pred))}


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

        self.bank, self.seen, self.mean = weight(4, shape[-1]), weight(), weight(8)

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


WHOLE: dict[str, tuple[type[keras.Model], Any]] = {
    "clipping": (Clipped, None),
    "a term across examples": (Contrastive, None),
    "a loss per example": (PerExample, None),
    "metrics in compute_loss": (Measured, None),
    "hidden metrics": (Hidden, None),
    "a memory": (keras.Model, Memory),
    "batch normalization": (keras.Model, layers.BatchNormalization),
    "a layer across examples": (keras.Model, Crossing),
}
_QUICK = ("clipping", "metrics in compute_loss", "hidden metrics")


@program(cases=WHOLE, in_gate=_QUICK, tolerance=2e-5)
def a_step_with(world: World, case: Any) -> Any:
    kind, layer = case

    def make() -> keras.Model:
        x = keras.Input((8,))
        return kind(x, layers.Dense(3)(layer()(x) if layer else x))

    return fitted(world, compiled(make, lambda: SGD(0.05), "mse"), X, Y)


class TwoOptimizers(keras.Model):
    """Keeps its optimizers in a list or in a dict."""

    is_dict = False

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = layers.Dense(3), layers.Dense(3)

    def compile(self, *given: Any, **about: Any) -> None:
        super().compile(loss="mse")
        made = [SGD(0.1), keras.optimizers.Adam(0.01)]
        self.several = dict(zip("ab", made, strict=True)) if self.is_dict else made

    def call(self, x: Any) -> Any:
        return self.one(x) + self.two(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        values = self.several.values() if self.is_dict else self.several
        for layer, optimizer in zip((self.one, self.two), list(values), strict=True):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            v = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, v), v, strict=True))
        return {"loss": loss}


@program(3, cases={"a list": False, "a dict": True}, in_gate=["a dict"])
def optimizers_in(world: World, case: bool) -> Any:
    def make() -> keras.Model:
        model = type("Two", (TwoOptimizers,), {"is_dict": case})()
        model.build([None, 8])
        return model

    return world.made(compiled(make)).fit(X, Y, **FIT).history


class Adversaries(keras.Model):
    """A GAN, with two optimizers and its own step; its noise is not random."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([layers.Input((4,)), layers.Dense(8)])
        self.discriminator = keras.Sequential([layers.Input((8,)), layers.Dense(1)])
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, *given: Any, **about: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = keras.optimizers.Adam(0.01), SGD(0.1)

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker, self.g_tracker]

    def train_step(self, real: Any) -> Any:
        noise = tf.sin(7 * real[:, :4])
        fake = self.generator(noise)
        both = tf.concat([fake, real], 0)
        targets = tf.concat([tf.ones_like(fake), tf.zeros_like(real)], 0)[:, :1]
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(targets, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(
            zip(tape.gradient(d_loss, weights), weights, strict=True)
        )
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros_like(judged), judged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(
            zip(tape.gradient(g_loss, weights), weights, strict=True)
        )
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


@program()
def a_gan(world: World) -> Any:
    model = world.made(compiled(Adversaries))
    return model.fit(X, **FIT).history, model.get_weights()


class Distiller(keras.Model):
    """Learns what a teacher says."""

    def __init__(self, teacher: Any) -> None:
        super().__init__()
        self.teacher, self.student = teacher, layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.student(x) - self.teacher(x)


@program(in_gate=True)
def a_teacher_from_outside(world: World) -> Any:
    keras.utils.set_random_seed(2)
    teacher = keras.Sequential([keras.Input([8]), layers.Dense(3)])
    teacher.compile("sgd", "mse")
    teacher.fit(X, Y, verbose=0, shuffle=False)
    teacher.trainable = False
    return fitted(world, compiled(lambda: Distiller(teacher)), X, Y)


@program(cases={"outside": False, "inside": True})
def saved_models_as_layers(world: World, case: bool) -> Any:
    saved = keras.Sequential([keras.Input([8]), layers.Dense(4, None, False, "ones")])
    with tempfile.TemporaryDirectory() as place:
        folder = str(pathlib.Path(place, "saved"))
        saved.export(folder, verbose=False)

        def load() -> Any:
            how = {} if case else {"trainable": False}
            return layers.TFSMLayer(folder, call_endpoint="serve", **how)

        outside = load()

        def make() -> keras.Model:
            layer = load() if case else outside
            return keras.Sequential([keras.Input([8]), layer, layers.Dense(3)])

        return fitted(world, compiled(make), X, Y)


class Convolution(Dense):
    """Of a graph, whose adjacency has a second axis of as many nodes."""

    def call(self, graph: Any) -> Any:
        return self.dense(tf.matmul(graph["adjacency"], graph["nodes"]))


@program()
def graphs_that_are_batches(world: World) -> Any:
    graph = {"adjacency": numbers(4, 23, 23), "nodes": X}
    return fitted(world, compiled(Convolution), graph, Y, batch_size=23)


# --- Scales of losses -----------------------------------------------------------------


@program(2, 3, cases={"1": 1, "5": 5}, in_gate=True)
def steps_that_overflow_with_rows(world: World, case: int) -> Any:
    """Those are skipped in which one device overflows.

    Its scale is a constant until the optimizer is built, in the first trace. The sum of
    five rows overflows before that of any replica's.
    """

    def make() -> keras.Model:
        dense = layers.Dense(3, dtype="mixed_float16", kernel_initializer="ones")
        model = keras.Sequential([keras.Input([4]), dense, layers.Activation("linear")])
        optimizer = keras.optimizers.LossScaleOptimizer(
            SGD(2.0**-12), initial_scale=2.0**17, dynamic_growth_steps=3
        )
        model.compile(optimizer, "mse")
        return model

    model, found = world.made(make), []
    for k in range(12):
        x = np.zeros([5, 4], "float32")
        x[:case] = 0.5 + k % 2
        model.train_on_batch(x, np.zeros([5, 3], "float32"))
        steps = int(model.optimizer.inner_optimizer.iterations)
        found.append((float(model.optimizer.dynamic_scale), steps))
    assert 2 < found[-1][1] < 12
    return found


@program(2, 3, in_gate=True, tolerance=2e-3)  # of float16
def mixed_precision(world: World) -> Any:
    def make() -> keras.Model:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return classifier()
        finally:
            keras.config.set_dtype_policy("float32")

    model = world.made(make)
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"
    # A shard may overflow where the whole batch does not; this scale avoids both.
    model.optimizer.initial_scale = 128.0
    history = model.fit(X, labels(0, 23), **FIT).history
    return history["loss"][0], float(model.optimizer.dynamic_scale)
