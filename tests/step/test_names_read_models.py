# SPDX-License-Identifier: Apache-2.0
"""The law of names, of Keras models: they are trained as they are at each call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicator.step import names_read
from tests import helpers

_X = np.arange(16, dtype=np.float32).reshape(4, 4) / 16


class _Blocks(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [_dense(4, 1), _dense(4, 2)]
        self.factor = 1.0

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.factor * x


class _Nested(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([_dense(4, 1), _dense(4, 2)])

    def call(self, x: Any) -> Any:
        return self.body(x)


def _dense(units: int, seed: int) -> Any:
    return keras.layers.Dense(
        units, kernel_initializer=keras.initializers.GlorotUniform(seed)
    )


def _sequential() -> Any:
    return keras.Sequential([keras.Input([4]), _dense(4, 1), _dense(4, 2)])


def _deferred() -> Any:
    return keras.Sequential([_dense(4, 1), _dense(4, 2)])


def _functional() -> Any:
    x = keras.Input([4])
    return keras.Model(x, _dense(4, 2)(_dense(4, 1)(x)))


def _freeze(model: Any) -> None:
    model.trainable = False


def _freeze_first(model: Any) -> None:
    model.layers[0 if len(model.layers) == 2 else 1].trainable = False


def _freeze_inside(model: Any) -> None:
    model.body.layers[0].trainable = False


def _grow(model: Any) -> None:
    model.add(_dense(2, 3))


def _set(model: Any) -> None:
    model.factor = 0.5


_CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "a model is frozen": (_sequential, _freeze),
    "a layer is frozen": (_functional, _freeze_first),
    "a layer of a deferred model": (_deferred, _freeze_first),
    "a layer within a layer": (_Nested, _freeze_inside),
    "a layer in a list": (_Blocks, lambda model: _freeze(model.blocks[1])),
    "a layer is added": (_sequential, _grow),
    "a layer is added to a deferred model": (_deferred, _grow),
    "a setting": (_Blocks, _set),
}


def _trained(kind: str, repl: Any) -> list[np.ndarray]:
    """Trains a model that is changed in between; returns its weights."""
    make, change = _CHANGES[kind]
    model = make()

    def step_fn(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(model(x) ** 2, 1))
            if repl is not None:
                loss *= repl.weight if repl.weight is not None else 0.5
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            if repl is not None:
                gradient = repl.all_reduce(gradient)
            variable.assign(variable - 0.1 * gradient)

    for changed in (False, True):
        if changed:
            change(model)
        for _ in range(2):
            if repl is None:
                step_fn(_X)
            else:
                repl.run(step_fn, _X, input_mode="global_batch")
    weights: list[np.ndarray] = model.get_weights()
    return weights


@pytest.mark.parametrize("kind", _CHANGES)
def test_a_changed_model_is_trained_as_it_is(kind: str) -> None:
    expected = _trained(kind, None)
    repl = helpers.make(2)
    with repl.context():
        actual = _trained(kind, repl)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_made_anew_is_the_one_that_is_trained() -> None:
    repl = helpers.make(2)
    model: Any = None
    optimizer: Any = None

    def cell() -> None:
        nonlocal model, optimizer
        with repl.context():
            model = _sequential()
            optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.1))

    def step_fn(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    losses = []
    for _ in range(2):
        cell()
        for k in range(1, 3):
            losses.append(float(repl.run(step_fn, _X, input_mode="global_batch")[0]))
            assert int(optimizer.iterations) == k
    assert losses[:2] == losses[2:]


def test_a_model_compiled_anew_trains_with_its_new_optimizer() -> None:
    repl = helpers.make(2)
    y = np.ones([4, 4], np.float32)
    with repl.context():
        model = _sequential()
        for loss in ("mse", "mae"):
            optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.1))
            model.compile(optimizer, loss, metrics=["mae"])
            for k in range(1, 3):
                expected = model.evaluate(_X, y, verbose=0, return_dict=True)["loss"]
                model.reset_metrics()
                repl.run(model.train_step, (_X, y), input_mode="global_batch")
                assert int(optimizer.iterations) == k
                actual = float(model.get_metrics_result()["loss"])
                np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_each_change_of_layers_is_seen(name: str) -> None:
    lib = pytest.importorskip(name)
    repl = helpers.make(2)
    with repl.context():
        first, inner, last = (lib.layers.Dense(4) for _ in range(3))
        model = lib.Sequential([lib.layers.Input([4]), first, lib.Sequential([inner])])
        model.build([None, 4])
    step_fn = lambda: tf.constant(len(model.trainable_variables))  # noqa: E731
    counts = []
    for change in (
        lambda: None,
        lambda: _freeze(inner),
        lambda: _freeze(model),
        lambda: setattr(model, "trainable", True),
        lambda: model.add(last),
    ):
        change()
        counts.append(int(repl.run(step_fn)[0]))
        assert counts[-1] == int(step_fn())
    assert counts == [4, 2, 0, 4, 6]


def _calls_to_compare(layers: int) -> int:
    """Returns how many functions of Python are called to compare a model's names."""
    model = keras.Sequential([_dense(4, k) for k in range(layers)])
    step_fn = lambda: model  # noqa: E731
    names, events = names_read.Names(step_fn), []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    same = names.is_unchanged()
    sys.setprofile(None)
    assert same
    return events.count("call")


def test_comparing_calls_no_python_for_each_layer() -> None:
    assert _calls_to_compare(2) == _calls_to_compare(20) <= 5
