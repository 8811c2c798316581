# SPDX-License-Identifier: Apache-2.0
"""Models keep their type, and what is theirs is found; traces do not grow."""

from __future__ import annotations

import copy
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicator.keras import functions, state
from replicator.optimizers.wrapped import Wrapped
from replicator.strategy import AllReduce
from tests import helpers
from tests.keras import worlds
from tests.keras.losses import Inner, Outer
from tests.keras.worlds import World, classifier, labels, numbers

layers = keras.layers
X, Y = numbers(0, 17, 8), labels(0, 17)
FIT: dict[str, Any] = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}


def _model(**options: Any) -> Any:
    return World(helpers.make(2)).made(lambda: classifier(**options))


def test_it_is_the_same_object() -> None:
    repl = helpers.make(2)
    with repl.context():
        model = classifier()
    kind, config = type(model), model.get_config()
    compiled = model.get_compile_config()
    assert repl.keras_model(repl.keras_model(model)) is model
    assert type(model) is kind and model.get_config() == config
    assert model.get_compile_config() == compiled


def test_optimizers_are_wrapped_once() -> None:
    repl = helpers.make(2)
    with repl.context():
        model = classifier(optimizer=repl.wrap_optimizer(keras.optimizers.SGD(0.1)))
    optimizer = model.optimizer
    assert repl.keras_model(model).optimizer is optimizer
    with repl.context():
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        model = classifier(optimizer=scaled)
    assert isinstance(repl.keras_model(model).optimizer, Wrapped)
    assert isinstance(_model().optimizer, Wrapped)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_functions_that_keras_made_are_replaced(eagerly: bool, steps: int) -> None:
    repl = helpers.make(2)
    with repl.context():
        model = classifier(run_eagerly=eagerly, steps_per_execution=steps)
    for _ in range(2):  # those that keras_model makes, too
        for name in ("train", "test", "predict"):
            getattr(model, f"make_{name}_function")()
            assert getattr(model, f"{name}_function") is not None
        repl.keras_model(model)
        assert model.train_function is model.predict_function is None


def test_what_is_inside_is_found_once() -> None:
    model = Inner()
    model.more = {"again": [model.dense], "inner": Outer()}
    actual = list(state.inside(model))
    assert model.size in actual and model.dense in actual
    assert len({id(one) for one in actual}) == len(actual)
    assert model.more["inner"] not in actual


# --- What travels ---------------------------------------------------------------------


def test_gradients_travel_as_the_strategy_says() -> None:
    dtypes = set()

    def program(world: World) -> Any:
        model = world.made(classifier)
        model.fit(X, Y, **FIT)
        if world.repl:
            operands = [value for row in world.repl.plan for value in row.operands[0]]
            dtypes.update(v.dtype for v in operands if tuple(v.shape) == (8, 16))
        return model.get_weights()

    builder = AllReduce(compressor="bf16")
    found = worlds.outcome(program, 2, strategy=builder)
    for one, plain in zip(found, worlds.outcome(program, 0), strict=True):
        assert 0 < np.max(np.abs(one - plain)) < 1e-2
    assert dtypes == {"bfloat16"}


@pytest.mark.slow
def test_gradients_of_large_layers_travel_as_factors() -> None:
    # Keras passes the gradients of all layers through one op; products are seen behind.
    repl = helpers.make(2, factors=True)
    with repl.context():
        inner = [layers.Dense(512), layers.Dense(1)]
        model = repl.keras_model(keras.Sequential([keras.Input([512]), *inner]))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x = numbers(0, 8, 512)
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    assert ["factors" in row.algorithm for row in repl.plan] == [True]


class Summarized(keras.Sequential):
    """Writes a summary in each step."""

    writer: Any = None

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        with self.writer.as_default(step=0):
            tf.summary.scalar("total", tf.reduce_sum(data[0]))
        return logs


def test_summaries_of_a_step_are_written_once(tmp_path: pathlib.Path) -> None:
    Summarized.writer = tf.summary.create_file_writer(str(tmp_path))

    def make() -> keras.Model:
        model = Summarized([keras.Input([8]), layers.Dense(3)])
        model.compile("sgd", worlds.SPARSE)
        return model

    World(helpers.make(3)).made(make).fit(X, Y, **FIT)
    Summarized.writer.flush()
    (path,) = tmp_path.iterdir()
    values = [
        float(tf.make_ndarray(value.tensor))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    expected = [X[k : k + 7].sum() for k in (0, 7, 14)] * 2
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


# --- Traces ---------------------------------------------------------------------------


class Noting(layers.Layer):
    """Notes with which shapes it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def call(self, x: Any) -> Any:
        self.noted.append(tuple(x.shape))
        return x


class Around(keras.Model):
    """Does not say which sizes its inputs have."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside

    def call(self, x: Any) -> Any:
        return self.inside(x)


def _of_sequences(declared: bool) -> tuple[Any, list[Any]]:
    """Returns a model, and the shapes with which it is called."""
    noting = Noting()
    model = keras.Sequential([keras.Input([None, 3]), noting, layers.Dense(3)])
    model = model if declared else Around(model)
    model.compile("sgd", "mse")
    model(np.zeros([1, 1, 3]))
    return model, noting.noted


@pytest.mark.parametrize(
    "name, declared, wanted",
    [("train", False, 2), ("train", True, 1), ("predict", False, 2), ("test", True, 1)],
)
def test_traces_and_builds_do_not_grow_with_lengths(
    name: str, declared: bool, wanted: int
) -> None:
    """Lengths that keras.Input leaves open are unknown from the beginning."""
    repl = helpers.make(2)
    with repl.context():
        model, noted = _of_sequences(declared)
    repl.keras_model(model)
    expected, plans, counts = _of_sequences(declared)[0], set(), []
    expected.set_weights(model.get_weights())
    for k in range(20):
        x = numbers(k, 1 + 7 * k % 20, 1 + 3 * k % 20, 3)
        given = [x] if name == "predict" else [x, x]
        actual = getattr(model, f"{name}_on_batch")(*given)
        wanted_now = getattr(expected, f"{name}_on_batch")(*given)
        np.testing.assert_allclose(actual, wanted_now, rtol=1e-4, atol=1e-5)
        counts.append(len(noted))  # the first: with what Keras needs to build it
        plans.add(id(repl.plan))
    assert counts[-1] - counts[0] == wanted - 1 and noted[-1][1] is None
    assert len(plans) <= 2 * wanted  # of few rows, which are not split, and of others


def test_lengths_of_data_sets_are_traced_once() -> None:
    repl = helpers.make(2)
    with repl.context():
        model, noted = _of_sequences(declared=False)
    repl.keras_model(model)
    parts = [numbers(k, k, 3) for k in range(1, 9)]
    data = tf.data.Dataset.from_generator(
        lambda: ((part, part) for part in parts),
        output_signature=(tf.TensorSpec([None, 3]),) * 2,
    )
    noted.clear()
    model.fit(data.padded_batch(2), epochs=2, verbose=0)
    assert set(noted) == {(None, None, 3)} and len(noted) <= 2  # Keras builds it, too


def test_batches_of_other_structures_are_other_programs() -> None:
    def in_first(batch: Any) -> tf.Tensor:
        return tf.constant(len(tf.nest.flatten(batch[0])))

    run = functions.BatchFunction(in_first, helpers.make(2), lambda specs: specs)
    x, y, z = (tf.ones([4, k]) for k in (1, 2, 3))
    assert [int(run(batch)) for batch in ((x, (y, z)), ((x, y), z))] == [1, 2]


# --- Copies ---------------------------------------------------------------------------


@pytest.mark.slow
def test_files_load_without_replicator(tmp_path: pathlib.Path) -> None:
    model = _model()
    model.fit(X, Y, **FIT)
    path = tmp_path / "model.keras"
    model.save(path)
    expected = model.predict(X, verbose=0)
    for name, value in ("x", X), ("y", expected):
        np.save(tmp_path / f"{name}.npy", value)
    code = f"""
import sys, keras, numpy as np
model = keras.saving.load_model({str(path)!r})
x, y = (np.load({str(tmp_path)!r} + f"/{{name}}.npy") for name in "xy")
np.testing.assert_allclose(model.predict(x, verbose=0), y, rtol=1e-5, atol=1e-6)
assert int(model.optimizer.iterations) == 6
assert "replicator" not in sys.modules
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_copies_are_plain_models() -> None:
    model = _model()
    model.fit(X, Y, **FIT)
    for other in (
        keras.models.clone_model(model),
        type(model).from_config(model.get_config()),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    ):
        assert "make_train_function" not in vars(other)
        other.compile("sgd", worlds.SPARSE)
        other.fit(X, Y, verbose=0)


def test_weights_are_loaded(tmp_path: pathlib.Path) -> None:
    model, path = _model(), tmp_path / "weights.weights.h5"
    before = model.evaluate(X, Y, verbose=0)
    model.save_weights(path)
    model.fit(X, Y, **FIT)
    model.load_weights(path)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), before, rtol=1e-6)
