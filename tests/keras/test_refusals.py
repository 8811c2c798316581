# SPDX-License-Identifier: Apache-2.0
"""What keras_model and fit refuse, and warn of: each program with its message.

A program is a function of a Replicator of two replicas under `refused`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from replicator.errors import ArgumentError, ContextError
from tests import helpers
from tests.keras import worlds
from tests.keras.worlds import World, classifier, labels, mlp, numbers

layers = keras.layers
X, Y = numbers(0, 17, 8), labels(0, 17)
REFUSED: list[Any] = []


def refused(error: type[Exception], message: str, cases: Any = None) -> Any:
    """Adds a program to the table, or one for each case; . is any character."""

    def register(program: Callable[..., Any]) -> Any:
        for name, case in (cases or {"": None}).items():
            own = functools.partial(program, case=case) if cases else program
            title = f"{program.__name__}, {name}" if cases else program.__name__
            REFUSED.append(pytest.param(own, error, message, id=title))
        return program

    return register


# --- What was made elsewhere ----------------------------------------------------------

_COMPILED_OUTSIDE = (
    "^the metric loss of the model sequential.*, which was created outside of the "
    "context.*at .*test_refusals.*Fix: create it under `with repl.context.* call "
    "compile there, which makes metrics"
)


def _sequential(*inside: Any) -> keras.Model:
    model = keras.Sequential([layers.Input((8,)), *inside, layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


@refused(ContextError, "kernel, which was created outside.*Fix")
def a_model_made_outside(repl: Any) -> None:
    repl.keras_model(mlp())


@refused(ContextError, _COMPILED_OUTSIDE)
def a_model_compiled_outside(repl: Any) -> None:
    with repl.context():
        model = mlp()
    model.compile("sgd", "mse")
    repl.keras_model(model)


@refused(ContextError, _COMPILED_OUTSIDE)
def a_model_compiled_outside_later(repl: Any) -> None:
    model = World(repl).made(classifier)
    model.compile("sgd", worlds.SPARSE)
    model.fit(X, Y, verbose=0)


@refused(ContextError, "metric area of the model.*Fix: create")
def a_metric_made_outside(repl: Any) -> None:
    metric = keras.metrics.AUC(name="area")
    World(repl).made(lambda: classifier(metrics=[metric]))


@refused(ContextError, "optimizer=SGD of the model.*Fix")
def an_optimizer_made_outside(repl: Any) -> None:
    optimizer = keras.optimizers.SGD(0.1)
    World(repl).made(lambda: classifier(optimizer=optimizer))


@refused(ContextError, "another Replicator, of 3 replicas")
def another_replicators_model(repl: Any) -> None:
    with helpers.make(3).context():
        model = classifier()
    repl.keras_model(model)


@refused(ContextError, "created outside of the context is written.*Fix")
def a_layer_made_outside_is_trained(repl: Any) -> None:
    trained = layers.Dense(8)
    trained.build([None, 8])
    model = World(repl).made(lambda: _sequential(layers.Dense(8), trained))
    model.predict(X, verbose=0)
    model.fit(X, numbers(1, 17, 3), verbose=0)


# --- What is no model, or has its own -------------------------------------------------


@refused(
    ArgumentError,
    "keras_model was given.*Fix",
    {
        "None": None,
        "a layer": layers.Dense(1),
        "a text": "model",
        "a class": keras.Model,
    },
)
def what_is_no_model(repl: Any, case: Any) -> None:
    repl.keras_model(case)


@refused(ArgumentError, "keras_model was given local_statistics='yes'.*is one of False")
def what_is_no_boolean(repl: Any) -> None:
    repl.keras_model(_sequential(), local_statistics="yes")


@refused(ArgumentError, 'op="sum".*Fix: .*reduction="sum"')
def gradients_that_are_summed(repl: Any) -> None:
    def make() -> keras.Model:
        optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.1), op="sum")
        return classifier(optimizer=optimizer)

    World(repl).made(make)


@refused(ArgumentError, "stateful.*test_refusals.py")
def a_stateful_layer(repl: Any) -> None:
    with repl.context():
        inside = [keras.Input(batch_shape=[4, 5, 2]), layers.LSTM(3, stateful=True)]
        model = keras.Sequential(inside)
        model.compile("sgd", "mse")
    repl.keras_model(model)


NAMES = ("train", "test", "predict")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("on_object", [False, True])
def test_models_that_make_their_own_functions(name: str, on_object: bool) -> None:
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
    pattern = f"(?s)Own.*{method}.*test_refusals.py.*{name}_step"
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", _SET_BY_HAND)
def test_so_are_those_that_were_given_such_functions(name: str, how: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        model = classifier()
    attribute = f"{name}_function"
    getattr(model, f"make_{attribute}")()
    setattr(model, attribute, _SET_BY_HAND[how](getattr(model, attribute)))
    pattern = f"(?s)its own {attribute}.*test_refusals.py.*{name}_step"
    with pytest.raises(ArgumentError, match=pattern):
        repl.keras_model(model)
    setattr(model, attribute, None)
    repl.keras_model(model)


# --- Steps ----------------------------------------------------------------------------


class Communicating(keras.Model):
    """Communicates in its step or its call."""

    def __init__(self, repl: Any, where: str) -> None:
        super().__init__()
        self.repl, self.where, self.dense = repl, where, layers.Dense(1)

    def call(self, x: Any) -> Any:
        if self.where == "call":
            self.repl.all_reduce(tf.reduce_mean(x))
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        if self.where == "train_step":
            self.repl.all_reduce(tf.reduce_mean(data[0]))
        return super().train_step(data)


@refused(
    ContextError,
    "^all_reduce was called in train_step of the model .*for one device.*  at "
    ".*test_refusals.py:.* in (call|train_step)\nFix: leave all_reduce out",
    {f"{w} {eager}": (w, eager) for w in ("call", "train_step") for eager in (0, 1)},
)
def communication(repl: Any, case: Any) -> None:
    where, eagerly = case

    def make() -> keras.Model:
        model = Communicating(repl, where)
        model.compile("sgd", "mse", run_eagerly=bool(eagerly))
        return model

    World(repl).made(make).fit(X[:4], np.zeros([4, 1]), verbose=0)


@refused(ValueError, "cardinality")
def arrays_of_two_lengths(repl: Any) -> None:
    World(repl).made(classifier).fit(X, Y[:5], verbose=0)


@refused(ValueError, "differ in their first dimension.*Fix")
def batches_of_two_lengths_in_a_loop(repl: Any) -> None:
    model = World(repl).made(lambda: classifier(steps_per_execution=3))
    model.make_train_function()
    spec = (tf.TensorSpec([None, 8]), tf.TensorSpec([None], tf.int64))
    pairs = [(X[:4], Y[:4]), (X[:4], Y[:2])]
    data = tf.data.Dataset.from_generator(lambda: iter(pairs), output_signature=spec)
    try:
        model.train_function(iter(data))
    finally:
        assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("program, error, message", REFUSED)
def test_it_is_refused(program: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        program(helpers.make(2))


# --- Warnings -------------------------------------------------------------------------


def test_run_eagerly_warns_once_that_it_is_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[Any] = []
    monkeypatch.setattr(logging, "log_first_n", lambda *given: messages.append(given))
    monkeypatch.setattr(logging, "warning", lambda *given: messages.append(given))
    for num_replicas in 1, 2:
        world = World(helpers.make(num_replicas))
        model = world.made(lambda: classifier(run_eagerly=True))
        model.train_on_batch(X, Y)
        assert len(messages) == num_replicas - 1
    assert "for debugging" in messages[0][1] and "run_eagerly=False" in messages[0][1]


def test_jit_compile_warns_that_it_is_without_xla(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None for Keras' own choice, "auto"."""
    told: list[Any] = []
    monkeypatch.setattr(logging, "log_first_n", lambda *given: told.append(given))
    world = World(helpers.make(2))
    model = world.made(lambda: classifier(jit_compile="auto"))
    model.make_train_function()
    assert not told
    with world.context():
        model.compile("sgd", worlds.SPARSE, jit_compile=True)
    model.predict(X, verbose=0)
    ((_, form, times, text),) = told
    assert times == 1
    assert re.search(
        r"(?s)runs without XLA.*test_refusals.py:\d+.*Fix: leave out jit_compile",
        form % text,
    )


@pytest.mark.parametrize("how", ["arrays", "data set"])
def test_fit_without_examples_warns_as_ever(how: str) -> None:
    data: Any = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).take(0)
    given = (X[:0], Y[:0]) if how == "arrays" else (data,)
    found = []
    for world in (World(), World(helpers.make(2))):
        with pytest.warns(UserWarning, match="ran out of data") as told:
            model = world.made(lambda: classifier(metrics=None))
            history = model.fit(*given, verbose=0).history
        found.append((history, {str(one.message) for one in told}))
    assert found[0] == found[1]
