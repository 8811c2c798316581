# SPDX-License-Identifier: Apache-2.0
"""Programs of fit: batches of all sizes and structures, from all sources."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.keras.fits import FIT, Batches, X, Y, compiled, fitted, program
from tests.keras.worlds import World, classifier, mlp, numbers

layers, callbacks = keras.layers, keras.callbacks
SGD = keras.optimizers.SGD


# --- Sizes ----------------------------------------------------------------------------


@program(1, 2, 3, cases={"11": 11, "6": 6, "1": 1}, in_gate=["11"])
def batches_of(world: World, case: int) -> Any:
    model = world.made(classifier)
    history = model.fit(X, Y, **(FIT | {"batch_size": case})).history
    return history, model.get_weights(), model.predict(X, case, verbose=0)


@program()
def methods_by_batch(world: World) -> Any:
    model, results = world.made(classifier), []
    for size in (1, 2, 5, 6):
        x, y = X[:size], Y[:size]
        results += [
            model.train_on_batch(x, y, sample_weight=np.arange(1.0, size + 1)),
            model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0, 2: 3.0}),
            model.test_on_batch(x, y),
            model.predict_on_batch(x),
        ]
    return results


@program(
    cases={
        "validation_split": {"validation_split": 0.3, "epochs": 1},
        "validation_batch_size": {
            "validation_data": (X[:7], Y[:7]),
            "validation_batch_size": 3,
        },
        "validation_freq": {
            "validation_data": (X[:7], Y[:7], np.arange(7.0)),
            "validation_freq": 2,
        },
        "class_weight": {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
        "sample_weight": {"sample_weight": np.linspace(0.0, 2.0, 23)},
        "steps_per_epoch": {"steps_per_epoch": 2},
        "initial_epoch": {"initial_epoch": 1},
        "loops": {"steps": 100},
        "loops, steps_per_epoch": {"steps": 2, "steps_per_epoch": 3},
        "loops, validation_split": {"steps": 4, "validation_split": 0.4},
        "loops, sample_weight": {
            "steps": 3,
            "sample_weight": np.linspace(0.0, 2.0, 23),
        },
    }
)
def what_fit_takes(world: World, case: dict[str, Any]) -> Any:
    given, seen = dict(case), Batches()
    steps = given.pop("steps", 1)
    make = lambda: classifier(steps_per_execution=steps)  # noqa: E731
    return fitted(world, make, batch_size=5, callbacks=[seen], **given), seen.logs


# --- Sources of batches ---------------------------------------------------------------


def _dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)


class _Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        part = slice(6 * index, 6 * index + 6)
        return X[part], Y[part]


def _generator() -> Any:
    while True:
        for k in range(4):
            yield X[6 * k : 6 * k + 6], Y[6 * k : 6 * k + 6]


@program(
    cases={
        "dataset": _dataset,
        "static": lambda: _dataset().unbatch().batch(6, drop_remainder=True),
        "endless": lambda: _dataset().repeat(),
        "PyDataset": _Sequence,
        "generator": _generator,
    }
)
def sources(world: World, case: Any) -> Any:
    model = world.made(classifier)
    history = model.fit(case(), epochs=2, steps_per_epoch=3, verbose=0).history
    scores = model.evaluate(case(), steps=3, verbose=0)
    return history, scores, model.predict(case(), steps=3, verbose=0)


def _nested() -> keras.Model:
    a, b = layers.Input((8,), name="a"), layers.Input((4,), name="b")
    joined = layers.Concatenate()([a, b])
    outputs = {"c": layers.Dense(2, name="c")(joined), "d": layers.Dense(1)(joined)}
    model = keras.Model({"a": a, "b": b}, outputs)
    weights, metrics = {"c": 0.3, "d": 2.0}, {"c": ["mae"], "d": ["mse"]}
    model.compile("adam", {"c": "mse", "d": "mae"}, weights, metrics)
    return model


@program(in_gate=True)
def nested_inputs_and_outputs(world: World) -> Any:
    x = {"a": X, "b": numbers(1, 23, 4)}
    y = {"c": numbers(2, 23, 2), "d": numbers(3, 23, 1)}
    model = world.made(_nested)
    history = model.fit(x, y, **FIT).history
    return history, model.evaluate(x, y, 5, verbose=0), model.predict(x, 5, 0)


class OfRagged(keras.Model):
    """Takes RaggedTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = layers.Embedding(20, 4), layers.Dense(1)

    def call(self, x: Any) -> Any:
        rows = self.embedding(x.to_tensor(shape=[None, 4]))
        return self.dense(tf.reduce_mean(rows, 1))


class OfSparse(keras.Model):
    """Takes SparseTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(tf.ensure_shape(tf.sparse.to_dense(x), [None, 4]))


@program(
    cases={"ragged": (OfRagged, 1), "sparse": (OfSparse, 1), "loops": (OfRagged, 3)}
)
def ragged_and_sparse_inputs(world: World, case: Any) -> Any:
    kind, steps = case
    rows = [list(range(1, 2 + i % 4)) for i in range(11)]
    x = tf.ragged.constant(rows, dtype=tf.int64)
    if kind is OfSparse:
        x = tf.sparse.from_dense(tf.cast(x.to_tensor(), tf.float32))
    data = tf.data.Dataset.from_tensor_slices((x, numbers(1, 11, 1))).batch(4)
    model = world.made(compiled(kind, steps_per_execution=steps))
    history = model.fit(data, epochs=2, verbose=0).history
    return history, model.predict(data, verbose=0)


@program(1, 2, 3)
def outputs_that_are_ragged(world: World) -> Any:
    class Ragged(keras.Model):
        def call(self, x: Any) -> Any:
            return {"rows": x, "ragged": tf.RaggedTensor.from_tensor(x, padding=-1)}

    x = np.arange(23)[:, None] % np.arange(1, 5)[None]
    return world.made(Ragged).predict(x, batch_size=5, verbose=0)


@program(2, 3, in_gate=True)
def rows_padded_to_the_longest_of_the_batch(world: World) -> Any:
    class Padded(keras.Model):
        def call(self, x: Any) -> Any:
            return tf.RaggedTensor.from_tensor(x, padding=-1.0).to_tensor()

    x = np.float32([[1] * (1 + k % 5) + [-1] * (4 - k % 5) for k in range(7)])
    return [world.made(Padded).predict_on_batch(x[:n]) for n in (7, 4, 1)]


class Scaled(keras.Model):
    """Is given a number with each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs["a"]) * inputs["scale"]


@program()
def a_number_for_all(world: World) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, numbers(1, 23, 1))).batch(5)
    data = data.map(lambda x, y: ({"a": x, "scale": tf.constant(2.0)}, y))
    return fitted(world, compiled(Scaled), data)


@program(in_gate=True)
def a_model_without_a_loss(world: World) -> Any:
    return world.made(mlp).predict(X, batch_size=6, verbose=0)


class Unbuilt(keras.Model):
    """Creates its variables at its first call, with inputs that are a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = layers.Embedding(4, 5), layers.Dense(3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.dense(inputs["x"] + tf.reduce_sum(self.embedding(inputs["k"]), 1))


@program(cases={"a dict": True, "an array": False}, in_gate=["a dict"])
def models_that_fit_builds(world: World, case: bool) -> Any:
    x = {"x": X[:, :5], "k": np.arange(46).reshape(23, 2) % 4} if case else X
    make = Unbuilt if case else lambda: keras.Sequential([layers.Dense(3)])
    made = compiled(make, lambda: SGD(0.1), "mse", jit_compile=True)
    return fitted(world, made, x, numbers(1, 23, 3))


def _use(dtype: str) -> None:
    """Sets the dtype of Keras; its policy remembers the one of its first use."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


@program(2, 3, in_gate=True, tolerance=1e-13)
def uneven_batches_of_float64(world: World) -> Any:
    def make() -> keras.Model:
        model = keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(1)])
        model.build([None, 8])
        metric = keras.metrics.MeanAbsoluteError()
        model.compile(SGD(0.1), "mse", metrics=[metric])
        return model

    try:
        _use("float64")
        return fitted(world, make, np.float64(X), np.float64(Y), batch_size=5)
    finally:
        _use("float32")
