# SPDX-License-Identifier: Apache-2.0
"""What was once wrong or refused in fit is as in plain Keras."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.keras.worlds import World, check, numbers

layers, ops = keras.layers, keras.ops
X, Y = numbers(0, 11, 4), numbers(1, 11, 3)
FIT: dict[str, Any] = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}


class Measured(keras.Model):
    """Logs what is no mean of examples, from compute_metrics."""

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        metrics = super().compute_metrics(x, y, y_pred, sample_weight)
        distance = ops.sqrt(ops.sum((y - y_pred) ** 2))
        return {**metrics, "norm": distance, "worst": ops.max(ops.abs(y - y_pred))}


def test_compute_metrics_may_return_what_is_no_mean() -> None:
    def make() -> keras.Model:
        x = keras.Input([4])
        model = Measured(x, layers.Dense(3)(x))
        model.compile("sgd", "mse")
        return model

    def program(world: World) -> Any:
        model = world.made(make)
        history = model.fit(X, Y, **FIT).history
        return history, model.evaluate(X, Y, 5, verbose=0, return_dict=True)

    check(program, [2, 3])


@pytest.mark.parametrize("rows", [1, 5])
def test_steps_are_skipped_in_which_one_device_overflows(rows: int) -> None:
    """Its scale is a constant until the optimizer is built, in the first trace.

    The sum of five rows overflows before that of any replica's.
    """

    def make() -> keras.Model:
        dense = layers.Dense(3, dtype="mixed_float16", kernel_initializer="ones")
        model = keras.Sequential([keras.Input([4]), dense, layers.Activation("linear")])
        sgd = keras.optimizers.SGD(2.0**-12)
        optimizer = keras.optimizers.LossScaleOptimizer(
            sgd, initial_scale=2.0**17, dynamic_growth_steps=3
        )
        model.compile(optimizer, "mse")
        return model

    def program(world: World) -> Any:
        model = world.made(make)
        optimizer, found = model.optimizer, []
        for k in range(12):
            x = np.zeros([5, 4], "float32")
            x[:rows] = 0.5 + k % 2
            model.train_on_batch(x, np.zeros([5, 3], "float32"))
            inner = optimizer.inner_optimizer.iterations
            found.append((float(optimizer.dynamic_scale), int(inner)))
        assert 2 < found[-1][1] < 12
        return found

    check(program, [2, 3])


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


@pytest.mark.slow
def test_sparse_inputs_may_be_left_out_of_a_loss() -> None:
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X), Y)).batch(5)

    def make() -> keras.Model:
        model = Constant()
        model.compile("sgd", "mse")
        return model

    def program(world: World) -> Any:
        model = world.made(make)
        return model.fit(data, epochs=2, verbose=0).history, model.get_weights()

    check(program, [2, 3])


def test_rows_are_padded_to_the_longest_of_the_batch() -> None:
    class Padded(keras.Model):
        def call(self, x: Any) -> Any:
            return tf.RaggedTensor.from_tensor(x, padding=-1.0).to_tensor()

    x = np.float32([[1] * (1 + k % 5) + [-1] * (4 - k % 5) for k in range(7)])

    def program(world: World) -> Any:
        return [world.made(Padded).predict_on_batch(x[:n]) for n in (7, 4, 1)]

    check(program, [2, 3])


@pytest.mark.parametrize("how", ["arrays", "data set"])
def test_fit_without_examples_is_as_ever(how: str) -> None:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input([4]), layers.Dense(3)])
        model.compile("sgd", "mse")
        return model

    data: Any = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).take(0)
    given = (X[:0], Y[:0]) if how == "arrays" else (data,)
    found = []
    for world in (World(), World(helpers.make(2))):
        with pytest.warns(UserWarning, match="ran out of data") as told:
            history = world.made(make).fit(*given, verbose=0).history
        found.append((history, {str(one.message) for one in told}))
    assert found[0] == found[1]


def test_summaries_of_a_step_are_written_once(tmp_path: pathlib.Path) -> None:
    writer = tf.summary.create_file_writer(str(tmp_path))

    class Summarized(keras.Model):
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            with writer.as_default(step=0):
                tf.summary.scalar("total", tf.reduce_sum(data[0]))
            return logs

    def make() -> keras.Model:
        x = keras.Input([4])
        model = Summarized(x, layers.Dense(3)(x))
        model.compile("sgd", "mse")
        return model

    world = World(helpers.make(3))
    world.made(make).fit(X, Y, **FIT)
    writer.flush()
    (path,) = tmp_path.iterdir()
    values = [
        float(tf.make_ndarray(value.tensor))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    expected = [X[k : k + 5].sum() for k in (0, 5, 10)] * 2
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
