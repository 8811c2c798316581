# SPDX-License-Identifier: Apache-2.0
"""Datasets as inputs: one object is one input, which continues, and dies with it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import InputError
from tests import helpers


def _echo(x: Any) -> Any:
    return x


@pytest.mark.parametrize("input_mode", ["per_replica", "per_worker"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_dataset_is_dealt(mode: str, replicas: int, input_mode: str) -> None:
    """Like an input_fn's dataset without a parameter."""
    repl = helpers.make(replicas)
    graph = tf.Graph().as_default() if mode == "session" else contextlib.nullcontext()
    with graph:
        data = tf.data.Dataset.range(100)
        run: Any = lambda: repl.run(_echo, data, input_mode)  # noqa: E731
        if mode == "session":
            fetches = run()
            session = tf.compat.v1.train.MonitoredSession()
            call: Any = lambda: session.run(fetches)  # noqa: E731
        else:
            call = tf.function(run) if mode == "function" else run
        elements = [int(x) for _ in range(3) for x in call()]
    assert elements == list(range(3 * replicas))


def test_one_dataset_goes_on_and_others_start_from_their_own_beginning() -> None:
    repl = helpers.make(2)
    one, other = tf.data.Dataset.range(100), tf.data.Dataset.range(100)
    for k in range(3):
        assert [int(x) for x in repl.run(_echo, one)] == [2 * k, 2 * k + 1]
        new = tf.data.Dataset.range(50, 100)
        assert [int(x) for x in repl.run(_echo, new)] == [50, 51]
    assert [int(x) for x in repl.run(_echo, other)] == [0, 1]
    assert repl.build(_echo, one) is repl.build(_echo, one)
    assert repl.build(_echo, one) is not repl.build(_echo, other)
    repl.initialize()
    assert [int(x) for x in repl.run(_echo, one)] == [0, 1]


def test_a_dataset_goes_on_in_functions_that_are_traced_again() -> None:
    repl, data = helpers.make(2), tf.data.Dataset.range(100)
    call = tf.function(lambda n: repl.run(_echo, data))
    assert [int(v) for v in call(1)] == [0, 1]
    assert [int(v) for v in call(2)] == [2, 3]
    assert [int(v) for v in repl.run(_echo, data)] == [4, 5]


def _generated() -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(
        lambda: iter(range(100)), output_signature=tf.TensorSpec([], tf.int32)
    )


@pytest.mark.parametrize("make", [lambda: tf.data.Dataset.range(100), _generated])
def test_nothing_is_kept_of_datasets_that_are_gone(make: Any) -> None:
    repl = helpers.make(2)

    def use() -> list[weakref.ref[Any]]:
        held = []
        for _ in range(3):
            data = make()
            repl.run(_echo, data)
            assert [int(x) for x in repl.run(_echo, data)] == [2, 3]
            held.append(weakref.ref(data))
        return held

    held = use()
    gc.collect()
    assert [ref() for ref in held] == [None] * 3
    assert len(repl._steps._states) == 0


def test_a_function_uses_a_dataset_that_nobody_holds() -> None:
    repl = helpers.make(2)
    held = [_generated()]
    call = tf.function(lambda: repl.run(_echo, held.pop()))
    assert [int(v) for v in call()] == [0, 1]
    gc.collect()
    assert [int(v) for v in call()] == [2, 3]
    repl.initialize()
    assert [int(v) for v in call()] == [0, 1]


def test_a_dataset_that_is_new_each_time_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repl = helpers.make(2)
    for _ in range(8):
        repl.build(_echo, tf.data.Dataset.range(8))
    (message,) = [r.getMessage() for r in caplog.records]
    assert "The Dataset at " in message and "test_registry.py:" in message
    assert "a new object 5 times" in message and "outside the loop" in message


def test_a_dataset_of_another_graph_is_refused() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():
        data = tf.data.Dataset.range(8)
    with pytest.raises(InputError, match=r"(?s)another graph.*Fix: "):
        repl.run(_echo, data)
    with tf.Graph().as_default(), pytest.raises(InputError, match="another graph"):
        repl.run(_echo, data)
    eager = tf.data.Dataset.range(8)
    with (
        tf.Graph().as_default(),
        pytest.raises(InputError, match="(?s)created eagerly.*Fix: "),
    ):
        repl.run(_echo, eager)

    @tf.function
    def inside() -> Any:
        return repl.run(_echo, tf.data.Dataset.range(8))

    with pytest.raises(InputError, match=r"(?s)test_registry\.py:\d+ in inside.*Fix: "):
        inside()
    with pytest.raises(InputError, match="(?s)an argument of it.*outside tf.func"):
        tf.function(lambda data: repl.run(_echo, data))(tf.data.Dataset.range(8))


def test_epochs_over_one_dataset() -> None:
    """The replacement for an input loop of plain TensorFlow."""
    repl = helpers.make(2)
    x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, 0])).batch(3)
    step = repl.build(lambda x, y: repl.all_reduce(tf.reduce_sum(y)), data)
    totals = []
    for _ in range(2):
        step.initialize()
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                totals.append(float(step()))
    assert totals == [30.0, 30.0]
