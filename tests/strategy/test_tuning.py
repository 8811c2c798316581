# SPDX-License-Identifier: Apache-2.0
"""tune measures strategies on real steps, of models that it makes for that purpose."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import strategy
from tests import helpers

_CHOICES = [strategy.Auto(), strategy.Mirrored(), strategy.PartitionedPS()]


def _maker(names: bool = True, ends: bool = False) -> Callable[[Any], Any]:
    """Returns a function that makes an embedding with a dense layer, and its step."""

    def make(chosen: Any) -> Any:
        repl = helpers.make(2, strategy=chosen)
        with repl.context():
            table = tf.Variable(tf.ones([6, 4]), name="table")
            dense = tf.keras.layers.Dense(3, name="dense" if names else None)
            dense.build([None, 4])
            optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1))
        variables = [table, *dense.trainable_variables]

        def step_fn(ids: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(dense(tf.gather(table, ids)) ** 2)
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        data = tf.data.Dataset.from_tensor_slices([[1, 3], [2, 2], [0, 5], [4, 1]])
        return repl, step_fn, data if ends else data.repeat()

    return make


def _tuned(make: Any, **options: Any) -> strategy.Strategy:
    arguments = {"strategies": _CHOICES, "trials": 2, "progress": False, **options}
    return strategy.tune(make, **arguments)


def test_the_fastest_is_a_strategy_that_can_be_saved(tmp_path: pathlib.Path) -> None:
    make = _maker()
    fastest = _tuned(make)
    measured = [trial.measured for trial in fastest.trials]
    assert None not in measured and measured == sorted(measured)
    assert all(trial.predicted > 0 for trial in fastest.trials)
    assert {trial.builder.partition("(")[0] for trial in fastest.trials} == {
        *("Auto", "Mirrored", "PartitionedPS")
    }
    assert fastest.trials[0].strategy == fastest.id
    assert [node.name for node in fastest.nodes] == [
        *("table", "dense/kernel", "dense/bias")
    ]
    assert "ms a step" in str(fastest)
    for name in ("fastest.pb", "fastest.json"):
        fastest.save(tmp_path / name)
        loaded = strategy.Strategy.load(tmp_path / name)
        assert (loaded, loaded.trials) == (fastest, fastest.trials)
    repl, step_fn, data = make(str(tmp_path / "fastest.pb"))
    repl.run(step_fn, data)
    assert repl.strategy == fastest


def test_what_was_made_before_is_as_it_was() -> None:
    make = _maker()
    repl, step_fn, data = make(None)
    repl.run(step_fn, data)
    before = [v.numpy() for v in repl._settings.factory.trained().values()]
    _tuned(make)
    after = [v.numpy() for v in repl._settings.factory.trained().values()]
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, two)
    other, same_fn, same = make(None)
    other.run(same_fn, same)
    for a, b in zip(repl.run(step_fn, data), other.run(same_fn, same), strict=True):
        assert a.shape == b.shape


def test_names_that_keras_gives_and_inputs_that_end() -> None:
    make = _maker(names=False, ends=True)  # 2 steps each, of which 2 warm up
    fastest = _tuned(make, trials=3, best=2)
    assert len(fastest.trials) == 2 and len(fastest.nodes) == 3


def test_what_cannot_be_built_is_said() -> None:
    class Nowhere(strategy.Builder):
        def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
            for variable in variables:
                yield strategy.Node(variable.path, strategy.PSSynchronizer("CPU:99"))

    with pytest.raises(replicator.ReplicatorError, match="CPU:99"):
        _tuned(_maker(), strategies=[Nowhere()])


def test_strategies_that_cannot_run_come_last() -> None:
    stale = strategy.PS(staleness=1)
    fastest = _tuned(_maker(), strategies=[stale, strategy.Mirrored()], best=9)
    assert [trial.measured is None for trial in fastest.trials] == [False, True]
    assert "staleness=1" in fastest.trials[1].problem
    assert "not measured: " in str(fastest)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials=0.*pass an int from 1"),
        ({"best": True}, "best=True.*pass an int"),
        ({"strategies": []}, "strategies=.*pass a list of builders"),
        ({"strategies": [strategy.Auto]}, "strategies=.*pass a list of builders"),
        ({"progress": 1}, "progress=1.*pass a bool"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(replicator.ArgumentError, match="(?s)tune was given " + message):
        _tuned(_maker(), **options)


def _none() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors([1, 3]).take(0)


def test_bad_functions() -> None:
    make = _maker()
    repl, step_fn, data = make(None)
    with pytest.raises(replicator.ArgumentError, match="(?s)Fix: pass a function that"):
        strategy.tune(repl, step_fn, data)  # type: ignore[arg-type]
    with pytest.raises(replicator.ArgumentError, match="(?s)returns None.*a tuple"):
        strategy.tune(lambda chosen: None)
    with pytest.raises(replicator.ArgumentError, match="(?s)with a strategy alone"):
        strategy.tune(lambda: make(None))  # type: ignore[arg-type]
    with pytest.raises(
        replicator.InputError, match="(?s)not have one element for each replica"
    ):
        _tuned(lambda chosen: (*make(chosen)[:2], lambda ctx: _none()))
    with pytest.raises(replicator.ArgumentError, match="(?s)1 first.*a Replicator"):
        strategy.tune(lambda chosen: (1, 2))
    with pytest.raises(replicator.StrategyError, match="(?s)asks its strategy for no"):
        strategy.tune(lambda chosen: make(None))
    sizes = iter(range(2, 9))

    def other(chosen: Any) -> Any:
        repl = helpers.make(2, strategy=chosen)
        with repl.context():
            v = tf.Variable(tf.ones([next(sizes)]), name="v")
            optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1))
        return repl, lambda: optimizer.apply_gradients([(tf.ones_like(v), v)])

    with pytest.raises(replicator.StrategyError, match="(?s)different variables each"):
        _tuned(other)

    @tf.function
    def inside() -> None:
        _tuned(make)

    with pytest.raises(replicator.ContextError, match="(?s)was called where a graph"):
        inside()
