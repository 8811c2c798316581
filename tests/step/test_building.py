# SPDX-License-Identifier: Apache-2.0
"""One build, three ways to run: the number of traces, and a step's surroundings."""

from __future__ import annotations

import functools
import gc
import threading
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import ContextError, errors
from tests import helpers

# --- Number of step_fn calls ---------------------------------------------------------


@pytest.mark.battery(5)
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_step_fn_is_called_once_per_replica(mode, replicas):
    repl = helpers.make(replicas)
    calls = []

    def step_fn(x):
        calls.append(repl.replica_id)
        assert repl.num_replicas == replicas
        state = tf.Variable(1.0)  # made in the step, which is not retraced for it
        return state * repl.all_reduce(tf.cast(x, tf.float32), "sum")

    def input_fn():
        return tf.data.Dataset.range(1000)

    values = helpers.run(mode, repl, lambda: step_fn, input_fn, steps=3)
    assert calls == list(range(replicas))
    total = sum(range(2 * replicas, 3 * replicas))  # of the third step's elements
    assert [float(v) for v in values] == [total] * replicas


def test_a_function_builds_the_step_at_each_trace():
    repl = helpers.make(2)
    calls = []

    def step_fn():
        calls.append(repl.replica_id)
        return repl.all_reduce(tf.constant(1), "sum")

    @tf.function
    def call(x):
        return x + repl.run(step_fn)[0]

    assert [int(call(k)) for k in (1, 2)] == [3, 4]
    assert calls == [0, 1, 0, 1]  # a Python number is part of the signature
    assert [int(call(tf.constant(k))) for k in (1, 2)] == [3, 4]
    assert calls == [0, 1] * 3


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_loop_in_a_function_holds_one_step(steps):
    repl = helpers.make(2)
    with repl.context():
        count = tf.Variable(0.0)
    calls = []

    def step_fn(x):
        calls.append(repl.replica_id)
        count.assign_add(repl.all_reduce(1.0, "mean"))
        return repl.all_reduce(x, "sum")

    @tf.function
    def loop(n):
        total = tf.constant(0, tf.int64)
        for _ in tf.range(n):
            total += repl.run(step_fn, lambda: tf.data.Dataset.range(100))[0]
        return total

    assert int(loop(tf.constant(steps))) == sum(range(2 * steps))
    assert int(loop(tf.constant(1))) == 4 * steps + 1  # the iterator goes on
    helpers.assert_replicas_equal([count])
    assert count.numpy() == steps + 1
    assert len(calls) % 2 == 0


def test_a_step_goes_on_when_the_function_is_traced_again():
    repl = helpers.make(2)

    def step_fn(x):
        on_read = tf.VariableSynchronization.ON_READ
        state = tf.Variable(0, dtype=tf.int64, synchronization=on_read)
        return state.assign_add(x)

    def input_fn():
        return tf.data.Dataset.range(99)

    call = tf.function(lambda n: repl.run(step_fn, input_fn))
    assert [int(v) for v in call(1)] == [0, 1]
    assert [int(v) for v in call(2)] == [2, 4]  # one state, one iterator


def test_functions_run_eagerly_are_traced_all_the_same():
    repl = helpers.make(2)
    tf.config.run_functions_eagerly(True)
    try:
        values = repl.run(lambda: repl.all_reduce(tf.constant(2.0), "sum"))
    finally:
        tf.config.run_functions_eagerly(False)
    assert [float(v) for v in values] == [4.0, 4.0]


# --- The surroundings of a step ------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@pytest.mark.parametrize("same", [True, False], ids=["same", "another"])
def test_no_run_inside_a_run(mode, same):
    repl = helpers.make(2)
    inner = repl if same else helpers.make(2)

    def step_fn():
        return inner.run(lambda: tf.constant(1))

    with pytest.raises(
        ContextError,
        match=r"(?s)a step was run inside a step.*test_building\.py:\d+ in "
        r"step_fn.*Fix: run it outside",
    ) as caught:
        helpers.run(mode, repl, lambda: step_fn)
    assert isinstance(caught.value, RuntimeError)
    assert [int(v) for v in repl.run(lambda: tf.constant(1))] == [1, 1]


def test_two_threads_run_two_replicators_at_once():
    """Each thread knows its own replica being built."""
    results: dict[int, Any] = {}
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        repl = replicator.Replicator(
            [f"CPU:{2 * index}", f"CPU:{2 * index + 1}"], build="trace"
        )
        with repl.context():
            total = tf.Variable(0.0)

        def step_fn():
            barrier.wait(30)  # both threads are inside a build, on the same replica
            total.assign_add(repl.all_reduce(float(index + repl.replica_id), "sum"))
            return total.read_value()

        for _ in range(20):
            values = repl.run(step_fn)
        results[index] = [float(v) for v in values]

    threads = [threading.Thread(target=work, args=[index]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {0: [20.0, 20.0], 1: [60.0, 60.0]}


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_tape_around_a_step_that_it_does_not_use(mode):
    """A tape that is open anyway does not make the step differentiate itself."""
    repl = helpers.make(2)
    with repl.context():
        weight = tf.Variable(3.0)

    def step_fn():
        return repl.all_reduce(weight * 2.0, "sum")

    call = (
        tf.function(repl.build(step_fn)) if mode == "function" else repl.build(step_fn)
    )
    with tf.GradientTape():
        assert [float(v) for v in call()] == [12.0, 12.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_devices_of_the_user_are_kept(mode):
    repl = helpers.make(2, build="trace")
    placed = []

    def step_fn():
        with tf.device("CPU:5"):
            placed.append(tf.random.uniform([]).device)
        with tf.device(None):
            pass
        placed.append(tf.random.uniform([]).device)

    helpers.run(mode, repl, lambda: step_fn)
    five = "/job:localhost/replica:0/task:0/device:CPU:5"
    assert placed == [five, repl.devices[0], five, repl.devices[1]]


class _Trainer:
    """A class whose methods are steps."""

    def __init__(self, repl: replicator.Replicator) -> None:
        self.repl = repl

    @tf.function
    def step(self) -> tf.Tensor:
        return self.repl.all_reduce(tf.constant(self.repl.replica_id), "max")


@pytest.mark.parametrize("mode", helpers.MODES)
def test_step_fn_may_be_a_function_of_a_class(mode):
    repl = helpers.make(3)
    trainer = _Trainer(repl)
    values = helpers.run(mode, repl, lambda: trainer.step)
    assert [int(v) for v in values] == [2, 2, 2]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_after_a_build_as_before(enabled: bool) -> None:
    repl = helpers.make(2, build="trace")
    during = []

    def step() -> None:
        during.append(gc.isenabled())
        if len(during) == 2:
            raise KeyError

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises((KeyError, replicator.ReplicatorError)):
            repl.run(step)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(during)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_another_librarys_object_that_asks_for_more_is_refused(mode: str) -> None:
    """Its signature may accept anything, as Keras' do."""
    repl = helpers.make(1)
    for asks in (tf.keras.metrics.Mean(), tf.keras.layers.Dense(3)):
        with pytest.raises(
            errors.ArgumentError,
            match=r"(?s)step_fn .* cannot be called with 0 arguments: TypeError: "
            r".*missing.* at tests/.*Fix: pass a function of your own",
        ):
            helpers.run(mode, repl, lambda asks=asks: asks)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_type_error_of_the_users_own_passes(mode: str) -> None:
    def step_fn() -> Any:
        return 1 + "a"  # type: ignore[operator]

    for own in (step_fn, tf.function(step_fn), functools.partial(step_fn)):
        with pytest.raises(TypeError, match="unsupported operand"):
            helpers.run(mode, helpers.make(1), lambda own=own: own)
