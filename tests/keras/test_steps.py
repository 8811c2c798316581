# SPDX-License-Identifier: Apache-2.0
"""Batches of any size and structure, in fit, evaluate and predict."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicator.keras import functions
from tests import helpers
from tests.keras.worlds import World, check, classifier, labels, mlp, numbers

layers = keras.layers
X, Y = numbers(0, 23, 8), labels(0, 23)


def some_slow(slow: list[Any], *quick: Any) -> list[Any]:
    """Returns parameters, some of which are slow."""
    return [*quick, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]


def _fit(world: World, **options: Any) -> Any:
    model = world.made(classifier)
    options = {"epochs": 2, "batch_size": 5, "verbose": 0, "shuffle": False} | options
    return model, model.fit(X, Y, **options).history


@pytest.mark.parametrize("batch_size", some_slow([1, 6], 11))
def test_batches_of_any_size(batch_size: int) -> None:
    def program(world: World) -> Any:
        model, history = _fit(world, batch_size=batch_size)
        return history, model.get_weights(), model.predict(X, batch_size, verbose=0)

    check(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"validation_split": 0.3, "epochs": 1},
        {"validation_data": (X[:7], Y[:7]), "validation_batch_size": 3},
        {"validation_data": (X[:7], Y[:7], np.arange(7.0)), "validation_freq": 2},
        {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
        {"sample_weight": np.linspace(0.0, 2.0, 23)},
        {"steps_per_epoch": 2},
        {"initial_epoch": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_fit_takes(options: dict[str, Any]) -> None:
    check(lambda world: _fit(world, **options)[1], [2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"run_eagerly": True},
        {"steps_per_execution": 2},
        {"optimizer": keras.optimizers.SGD(0.1, clipnorm=0.1)},
        {"optimizer": keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)},
        {"optimizer": keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5)},
        {"weighted_metrics": ["accuracy"]},
        {"loss": keras.losses.SparseCategoricalCrossentropy(reduction="sum")},
        {
            "loss": keras.losses.SparseCategoricalCrossentropy(
                reduction="mean_with_sample_weight"
            )
        },
    ],
    ids=lambda options: "-".join(f"{v}"[:30] for v in options.items()),
)
def test_what_compile_takes(options: dict[str, Any]) -> None:
    def program(world: World) -> Any:
        def make() -> keras.Model:
            arguments = dict(options)
            if "optimizer" in arguments:  # another one in each world
                kind = type(arguments["optimizer"])
                arguments["optimizer"] = kind.from_config(
                    arguments["optimizer"].get_config()
                )
            return classifier(**arguments)

        model = world.made(make)
        weights = np.linspace(0.5, 2.0, 23)
        fit = {"epochs": 2, "batch_size": 7, "verbose": 0, "shuffle": False}
        history = model.fit(X, Y, sample_weight=weights, **fit).history
        return history, model.get_weights()

    check(program, [2])


@pytest.mark.slow
def test_methods_by_batch() -> None:
    def program(world: World) -> Any:
        model = world.made(classifier)
        results = []
        for size in (1, 2, 5, 6):
            x, y = X[:size], Y[:size]
            results += [
                model.train_on_batch(x, y, sample_weight=np.arange(1.0, size + 1)),
                model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0, 2: 3.0}),
                model.test_on_batch(x, y),
                model.predict_on_batch(x),
            ]
        return results

    check(program)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        _dataset,
        lambda: _dataset().unbatch().batch(6, drop_remainder=True),
        lambda: _dataset().repeat(),
        _Sequence,
        _generator,
    ],
    ids=["dataset", "static", "endless", "PyDataset", "generator"],
)
def test_sources(source: Any) -> None:
    def program(world: World) -> Any:
        model = world.made(classifier)
        steps = {"epochs": 2, "steps_per_epoch": 3, "verbose": 0}
        history = model.fit(source(), **steps).history
        return (
            history,
            model.evaluate(source(), steps=3, verbose=0),
            model.predict(source(), steps=3, verbose=0),
        )

    check(program, [2])


def _nested() -> keras.Model:
    a, b = layers.Input((8,), name="a"), layers.Input((4,), name="b")
    joined = layers.Concatenate()([a, b])
    outputs = {"c": layers.Dense(2, name="c")(joined), "d": layers.Dense(1)(joined)}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        "adam",
        loss={"c": "mse", "d": "mae"},
        loss_weights={"c": 0.3, "d": 2.0},
        metrics={"c": ["mae"], "d": ["mse"]},
    )
    return model


def test_nested_inputs_and_outputs() -> None:
    x = {"a": X, "b": numbers(1, 23, 4)}
    y = {"c": numbers(2, 23, 2), "d": numbers(3, 23, 1)}

    def program(world: World) -> Any:
        model = world.made(_nested)
        fit = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, **fit).history
        return history, model.evaluate(x, y, 5, verbose=0), model.predict(x, 5, 0)

    check(program, [2])


class OfRagged(keras.Model):
    """Takes RaggedTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dense = layers.Embedding(20, 4), layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(
            tf.reduce_mean(self.embedding(x.to_tensor(shape=[None, 4])), 1)
        )


class OfSparse(keras.Model):
    """Takes SparseTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(tf.ensure_shape(tf.sparse.to_dense(x), [None, 4]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_inputs(kind: str) -> None:
    rows = [list(range(1, 2 + i % 4)) for i in range(11)]
    x = tf.ragged.constant(rows, dtype=tf.int64)
    if kind == "sparse":
        x = tf.sparse.from_dense(tf.cast(x.to_tensor(), tf.float32))
    data = tf.data.Dataset.from_tensor_slices((x, numbers(1, 11, 1))).batch(4)

    def program(world: World) -> Any:
        def make() -> keras.Model:
            model = OfRagged() if kind == "ragged" else OfSparse()
            model.compile("sgd", "mse")
            return model

        model = world.made(make)
        history = model.fit(data, epochs=2, verbose=0).history
        return history, model.predict(data, verbose=0)

    check(program)


@pytest.mark.slow
def test_outputs_are_in_order_and_may_be_ragged() -> None:
    class Ragged(keras.Model):
        def call(self, x: Any) -> Any:
            return {"rows": x, "ragged": tf.RaggedTensor.from_tensor(x, padding=-1)}

    x = np.arange(23)[:, None] % np.arange(1, 5)[None]

    def program(world: World) -> Any:
        return world.made(Ragged).predict(x, batch_size=5, verbose=0)

    check(program)


@pytest.mark.slow
def test_scalars_are_for_all() -> None:
    class Scaled(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs["a"]) * inputs["scale"]

    def make() -> keras.Model:
        model = Scaled()
        model.compile("sgd", "mse")
        return model

    data = tf.data.Dataset.from_tensor_slices((X, numbers(1, 23, 1))).batch(5)
    data = data.map(lambda x, y: ({"a": x, "scale": tf.constant(2.0)}, y))
    check(lambda world: world.made(make).fit(data, epochs=2, verbose=0).history, [2])


@pytest.mark.slow
def test_a_model_without_a_loss_predicts() -> None:
    check(lambda world: world.made(mlp).predict(X, batch_size=6, verbose=0))


def _use(dtype: str) -> None:
    """Sets the dtype of Keras; its policy remembers the one of its first use."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


def test_uneven_batches_of_float64_are_exact() -> None:
    def make() -> keras.Model:
        model = keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(1)])
        model.build([None, 8])
        metric = keras.metrics.MeanAbsoluteError()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[metric])
        return model

    def program(world: World) -> Any:
        model = world.made(make)
        options = {"batch_size": 5, "verbose": 0}
        x, y = np.float64(X), np.float64(Y)
        history = model.fit(x, y, shuffle=False, **options).history
        return history, model.get_weights(), model.evaluate(x, y, **options)

    try:
        _use("float64")
        check(program, tolerance=1e-13)
    finally:
        _use("float32")


def test_batches_of_other_structures_are_other_programs() -> None:
    def in_first(batch: Any) -> tf.Tensor:
        return tf.constant(len(tf.nest.flatten(batch[0])))

    run = functions.BatchFunction(in_first, helpers.make(2), lambda specs: specs)
    x, y, z = (tf.ones([4, k]) for k in (1, 2, 3))
    assert [int(run(batch)) for batch in ((x, (y, z)), ((x, y), z))] == [1, 2]
