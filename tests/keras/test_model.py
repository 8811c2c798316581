# SPDX-License-Identifier: Apache-2.0
"""Models keep their type; models made elsewhere are refused by name."""

from __future__ import annotations

import copy
import functools
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicator.errors import ArgumentError, ContextError
from replicator.optimizers.wrapped import Wrapped
from replicator.strategy import AllReduce
from tests import helpers
from tests.keras import worlds
from tests.keras.worlds import World, check, classifier, labels, mlp, numbers

layers = keras.layers
X, Y = numbers(0, 17, 8), labels(0, 17)
FIT = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}


def _model(num_replicas: int = 2, **options: Any) -> Any:
    return World(helpers.make(num_replicas)).made(lambda: classifier(**options))


def test_it_is_the_same_object() -> None:
    repl = helpers.make(2)
    with repl.context():
        model = classifier()
    kind, config = type(model), model.get_config()
    compiled = model.get_compile_config()
    assert repl.keras_model(model) is model
    assert type(model) is kind and model.get_config() == config
    assert model.get_compile_config() == compiled


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_compile_wraps_before_and_after(before: bool) -> None:
    def program(world: World) -> Any:
        keras.utils.set_random_seed(3)
        with world.context():
            model = mlp()
            if before:
                model.compile("sgd", "mse")
        if world.repl:
            world.repl.keras_model(model)
        with world.context():
            model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(X, numbers(1, 17, 3), **FIT).history
        assert not world.repl or isinstance(model.optimizer, Wrapped)
        return history

    check(program, [2])


def test_a_wrapped_optimizer_is_not_wrapped_again() -> None:
    repl = helpers.make(2)
    with repl.context():
        model = classifier(optimizer=repl.wrap_optimizer(keras.optimizers.SGD(0.1)))
    optimizer = model.optimizer
    assert repl.keras_model(model).optimizer is optimizer


@pytest.mark.slow
def test_freezing_and_compiling_again() -> None:
    def program(world: World) -> Any:
        model = world.made(classifier)
        histories = [model.fit(X, Y, **FIT).history]
        model.layers[0].layers[0].trainable = False
        with world.context():
            model.compile(keras.optimizers.Adam(0.01), worlds.SPARSE)
        histories += [model.fit(X, Y, **FIT).history for _ in range(2)]
        return histories, model.get_weights()

    check(program, [2])


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_keras() -> None:
    """Our accumulation over steps of any size equals Keras' own, on one device."""

    def program(world: World) -> Any:
        def make() -> keras.Model:
            if not world.repl:
                optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            else:
                optimizer = keras.optimizers.SGD(0.1)
                optimizer = world.repl.wrap_optimizer(optimizer, accumulation_steps=2)
            return classifier(optimizer=optimizer)

        model = world.made(make)
        # A last batch of one example.
        history = model.fit(X[:15], Y[:15], **FIT).history
        return history, model.get_weights()

    check(program, [2, 3])


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


def test_mixed_precision() -> None:
    def make() -> keras.Model:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return classifier()
        finally:
            keras.config.set_dtype_policy("float32")

    def program(world: World) -> Any:
        model = world.made(make)
        optimizer = model.optimizer
        assert type(optimizer).__name__ == "LossScaleOptimizer"
        assert isinstance(optimizer, Wrapped) == bool(world.repl)
        # A shard may overflow where the whole batch does not; this scale avoids both.
        optimizer.initial_scale = 128.0
        history = model.fit(X, Y, **FIT).history
        return history["loss"][0], optimizer.dynamic_scale

    plain = worlds.outcome(program, 0)
    for num_replicas in 2, 3:
        results = worlds.outcome(program, num_replicas)
        np.testing.assert_allclose(results[0], plain[0], rtol=2e-3)  # of float16
        assert results[1] == plain[1]


class Adversaries(keras.Model):
    """A GAN, with two optimizers and its own step; its noise is not random."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([layers.Input((4,)), layers.Dense(8)])
        self.discriminator = keras.Sequential([layers.Input((8,)), layers.Dense(1)])
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

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


def _gan() -> keras.Model:
    model = Adversaries()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1))
    return model


@pytest.mark.slow
def test_several_optimizers() -> None:
    def program(world: World) -> Any:
        model = world.made(_gan)
        return model.fit(X, **FIT).history, model.get_weights()

    check(program)


class Clipping(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        pairs = [(tf.clip_by_norm(g, 0.01), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs)


def test_an_optimizers_own_apply_gradients_is_called() -> None:
    def program(world: World) -> Any:
        model = world.made(lambda: classifier(optimizer=Clipping(1.0)))
        return model.fit(X, Y, **FIT).history, model.get_weights()

    check(program, [2])


@pytest.mark.parametrize("name", ["train", "test", "predict"])
@pytest.mark.parametrize("on_object", [False, True])
def test_models_that_make_their_own_functions_are_refused(
    name: str, on_object: bool
) -> None:
    method = f"make_{name}_function"

    def make(self: Any = None, force: bool = False) -> Any:
        raise AssertionError

    kind = type("Own", (keras.Sequential,), {} if on_object else {method: make})
    repl = helpers.make(2)
    with repl.context():
        model = kind([layers.Input((8,)), layers.Dense(3)])
        model.compile("sgd", "mse")
    if on_object:
        setattr(model, method, make)
    pattern = f"(?s)Own.*{method}.*test_model.py.*{name}_step"
    with pytest.raises(ArgumentError, match=pattern):
        repl.keras_model(model)


def _own(iterator: Any) -> Any:
    raise AssertionError


_SET_BY_HAND: dict[str, Callable[[Any], Any]] = {
    "plain": lambda made: _own,
    "compiled": lambda made: tf.function(_own),
    "not converted": lambda made: tf.autograph.experimental.do_not_convert(_own),
    "partial": lambda made: functools.partial(_own),
    "around Keras'": lambda made: functools.wraps(made)(lambda data: made(data)),
}


@pytest.mark.parametrize("name", ["train", "test", "predict"])
@pytest.mark.parametrize("how", _SET_BY_HAND)
def test_so_are_those_that_were_given_such_functions(name: str, how: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        model = classifier()
    attribute = f"{name}_function"
    getattr(model, f"make_{attribute}")()
    setattr(model, attribute, _SET_BY_HAND[how](getattr(model, attribute)))
    pattern = f"(?s)its own {attribute}.*test_model.py.*{name}_step"
    with pytest.raises(ArgumentError, match=pattern):
        repl.keras_model(model)
    setattr(model, attribute, None)
    repl.keras_model(model)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_functions_that_keras_made_are_replaced(eagerly: bool, steps: int) -> None:
    repl = helpers.make(2)
    with repl.context():
        model = classifier()
        model.compile(
            "sgd", worlds.SPARSE, run_eagerly=eagerly, steps_per_execution=steps
        )
    for _ in range(2):  # those that keras_model makes, too
        for name in ("train", "test", "predict"):
            getattr(model, f"make_{name}_function")()
            assert getattr(model, f"{name}_function") is not None
        repl.keras_model(model)
        assert model.train_function is model.predict_function is None


def test_keras_model_may_be_called_again() -> None:
    repl = helpers.make(2)
    with repl.context():
        model = classifier()
    assert repl.keras_model(repl.keras_model(model)) is model


# --- Files and copies -----------------------------------------------------------------


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
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_training_goes_on_from_a_file(tmp_path: pathlib.Path) -> None:
    def program(world: World) -> Any:
        model = world.made(classifier)
        model.fit(X, Y, **FIT)
        path = tmp_path / f"{world.repl and world.repl.num_replicas}.keras"
        model.save(path)
        with world.context():
            loaded = keras.saving.load_model(path)
        if world.repl:
            world.repl.keras_model(loaded)
        return loaded.fit(X, Y, **FIT).history

    check(program, [2])


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


_COMPILED_OUTSIDE = (
    "(?s)^the metric loss of the model sequential.*, which was created outside of the "
    "context.*at .*test_model.*Fix: create it under `with repl.context.* call compile "
    "there, which makes metrics"
)

# --- Errors ---------------------------------------------------------------------------


def test_a_model_made_outside_is_refused() -> None:
    with pytest.raises(
        ContextError, match="(?s)kernel, which was created outside.*Fix"
    ):
        helpers.make(2).keras_model(mlp())


def test_a_model_compiled_outside_is_refused() -> None:
    repl = helpers.make(2)
    with repl.context():
        model = mlp()
    model.compile("sgd", "mse")
    with pytest.raises(ContextError, match=_COMPILED_OUTSIDE):
        repl.keras_model(model)


def test_a_model_compiled_outside_later_is_refused() -> None:
    model = _model()
    model.compile("sgd", worlds.SPARSE)
    with pytest.raises(ContextError, match=_COMPILED_OUTSIDE):
        model.fit(X, Y, verbose=0)


def test_a_metric_made_outside_is_refused() -> None:
    repl, metric = helpers.make(2), keras.metrics.AUC(name="area")
    with repl.context():
        model = mlp()
        model.compile("sgd", "mse", metrics=[metric])
    with pytest.raises(ContextError, match="(?s)metric area of the model.*Fix: create"):
        repl.keras_model(model)


def test_an_optimizer_made_outside_is_refused() -> None:
    repl, optimizer = helpers.make(2), keras.optimizers.SGD(0.1)
    with repl.context():
        model = mlp()
        model.compile(optimizer, "mse")
    with pytest.raises(ContextError, match="(?s)optimizer=SGD of the model.*Fix"):
        repl.keras_model(model)


def test_gradients_that_are_summed_are_refused() -> None:
    repl = helpers.make(2)
    with repl.context():
        optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.1), op="sum")
        model = classifier(optimizer=optimizer)
    with pytest.raises(ArgumentError, match='(?s)op="sum".*Fix: .*reduction="sum"'):
        repl.keras_model(model)


def test_another_replicators_model_is_refused() -> None:
    with helpers.make(3).context():
        model = classifier()
    with pytest.raises(ContextError, match="(?s)another Replicator, of 3 replicas"):
        helpers.make(2).keras_model(model)


@pytest.mark.parametrize("model", [None, layers.Dense(1), "model", keras.Model])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ArgumentError, match="(?s)keras_model was given.*Fix"):
        helpers.make(2).keras_model(model)


def test_arrays_of_two_lengths_are_refused_in_keras_words() -> None:
    with pytest.raises(ValueError, match="cardinality"):
        _model().fit(X, Y[:5], verbose=0)
