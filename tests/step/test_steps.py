# SPDX-License-Identifier: Apache-2.0
"""Calling a step, threads, its lifetime, and plans."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from tests import helpers

# --- Calling --------------------------------------------------------------------------


def _counting(repl: replicator.Replicator) -> tuple[Any, Any, list[int]]:
    """Returns a step that counts, its variable, and a list that grows at each build."""
    with repl.context():
        count = tf.Variable(0)
    built: list[int] = []

    def step() -> Any:
        built.append(repl.replica_id)
        return {"new": count.assign_add(1, read_value=False), "one": tf.constant(1)}

    return step, count, built


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(k)` in `count` threads at once; raises an error that one raised."""
    start = threading.Barrier(count)

    def run(k: int) -> None:
        start.wait(60)
        work(k)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(run, k) for k in range(count)]:
            future.result(120)


def test_threads_share_a_step_which_is_built_once() -> None:
    repl = helpers.make(2)
    step, count, built = _counting(repl)
    sums: list[int] = []
    steps: list[Any] = []

    def work(_: int) -> None:
        steps.append(repl.build(step))
        sums.append(sum(int(sum(repl.run(step)["one"])) for _ in range(25)))

    _in_threads(4, work)
    assert sums == [50] * 4
    assert len({id(one) for one in steps}) == 1
    assert built == [0, 1]
    assert [int(value) for value in helpers.components(count)] == [100, 100]


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_of_threads_come_one_after_the_other(replicas: int) -> None:
    """Two steps over the same variables, each element taken once."""
    repl = helpers.make(replicas)
    with repl.context():
        variables = [tf.Variable(tf.zeros([64])) for _ in range(20)]

    def step_fn(x: Any) -> Any:
        for variable in variables:  # reads and writes, in more than one op
            variable.assign(2.0 * variable - (variable - 1.0))
        return x

    def other(x: Any) -> Any:
        return step_fn(x)

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.range(10**6)

    elements: list[int] = []

    def work(k: int) -> None:
        for _ in range(20):
            elements.extend(int(x) for x in repl.run((step_fn, other)[k % 2], input_fn))

    _in_threads(8, work)
    helpers.assert_replicas_equal(variables)
    assert {float(v) for one in variables for v in one.numpy()} == {160.0}
    assert sorted(elements) == sorted([*range(80 * replicas)] * 2)


def test_assignments_from_outside_wait_for_a_step() -> None:
    """No component is assigned during a step, nor in another order than the others."""
    repl = helpers.make(3)
    with repl.context():
        variable = tf.Variable(tf.zeros([32]))
    variables = []

    def make() -> None:
        with repl.context():
            variables.append(tf.Variable(0.0))

    def step_fn() -> Any:
        for k in range(10):
            variable.assign(tf.fill([32], float(k)))

    step = repl.build(step_fn)
    step()
    works: list[Callable[[], Any]] = [
        step,
        make,
        lambda: variable.assign_add(tf.fill([32], 100.0)),
        lambda: variable.assign(tf.fill([32], -1.0)),
        lambda: variable.scatter_nd_update([[3]], [-2.0]),
        lambda: variable.restore(tf.fill([32], -3.0)),
    ]
    turns, interval = threading.Barrier(len(works)), sys.getswitchinterval()

    def work(k: int) -> None:
        try:
            for _ in range(60):
                turns.wait(60)
                works[k]()
                if turns.wait(60) == 0:
                    helpers.assert_replicas_equal([variable, *variables])
        except BaseException:
            turns.abort()
            raise

    sys.setswitchinterval(1e-6)  # seconds; otherwise Python lets a thread run for long
    try:
        _in_threads(len(works), work)
    finally:
        sys.setswitchinterval(interval)


def test_callbacks_of_a_step_are_refused_where_they_would_wait_for_it() -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(1.0)
    inside = repl.build(lambda: tf.constant(0))
    inside()
    asked = threading.Event()

    def assign(value: Any) -> Any:
        asked.set()
        with contextlib.suppress(Exception):
            variable.assign(5.0)
        variable.read_value()  # waits for nothing
        inside()
        return value

    def late(x: Any) -> Any:
        time.sleep(0.05)  # seconds, after which the step waits for it
        return assign(x)

    def input_fn() -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(8)
        return dataset.map(lambda x: tf.py_function(late, [x], x.dtype))

    with pytest.raises(tf.errors.OpError) as caught:
        repl.run(lambda x: x, input_fn)
    assert "would have to wait for a step of this Replicator" in str(caught.value)
    assert "test_steps.py:" in str(caught.value)
    assert "between the steps" in str(caught.value)
    assert asked.is_set()
    assert [float(value) for value in helpers.components(variable)] == [1.0, 1.0]
    assert inside()[0].numpy() == 0


def test_the_device_around_a_call_moves_nothing() -> None:
    repl = helpers.make(2, build="trace")
    with repl.context():
        total = tf.Variable(1.0)
    placed = []

    def step() -> Any:
        new = total.assign_add(repl.all_reduce(total * 2.0, "mean"))
        placed.append(new.device)
        return new

    for device in ("CPU:3", "CPU:1", None):
        with tf.device(device):
            values = repl.run(step)
    assert [float(value) for value in values] == [27.0, 27.0]
    assert placed == [*repl.devices]
    assert [part.device for part in total.components] == [*repl.devices]


def test_what_fails_in_a_call_names_the_line_of_the_step() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        return tf.debugging.check_numerics(helpers.opaque(float("nan")), "told")

    with pytest.raises(tf.errors.InvalidArgumentError, match="told") as caught:
        repl.run(step)
    message = r"replica [01]: CheckNumerics at tests/step/test_steps\.py:\d+ in step"
    assert re.search(message, str(caught.value))


def test_no_tape_and_no_accumulator_sees_a_call() -> None:
    repl = helpers.make(2)
    with repl.context():
        weight = tf.Variable(3.0)
    step = repl.build(lambda: weight * weight)
    component = weight.components[0]
    with (
        tf.GradientTape(persistent=True) as tape,
        tf.autodiff.ForwardAccumulator(component, tf.ones([])) as accumulator,
    ):
        value = step()[0]
    assert tape.gradient(value, [weight, component]) == [None, None]
    assert accumulator.jvp(value) is None


def test_calls_work_while_tensorflow_runs_asynchronously() -> None:
    repl = helpers.make(2)
    step, count, _ = _counting(repl)
    tf.config.experimental.set_synchronous_execution(False)
    try:
        for _ in range(5):
            values = repl.run(step)["one"]
        assert [int(value) for value in values] == [1, 1]
    finally:
        tf.config.experimental.set_synchronous_execution(True)
    assert [int(value) for value in helpers.components(count)] == [5, 5]


def test_a_step_dies_with_its_replicator() -> None:
    def live_and_die() -> weakref.ref[Any]:
        repl = helpers.make(2)
        step, _, _ = _counting(repl)
        repl.run(step, None)
        return weakref.ref(repl.build(step))

    ref = live_and_die()
    gc.collect()
    assert ref() is None


_in_function = tf.function(lambda x: x * 2.0)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("fails", [False, True])
def test_the_graph_of_a_step_dies_with_its_step_fn(mode: str, fails: bool) -> None:
    """As in a notebook where a cell with the step_fn runs again and again.

    A user's function outside of the cell keeps no trace of it.
    """
    repl = helpers.make(2, build="trace")
    graphs: list[weakref.ref[Any]] = []
    with repl.context():
        weight = tf.Variable(1.0)

    def cell() -> None:
        def step_fn(x: Any) -> Any:
            graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
            loss = _in_function(repl.all_reduce(x)) + tf.Variable(1.0)
            if mode != "session":
                loss = _in_function.get_concrete_function(loss)(loss) + weight
            if fails and repl.replica_id == 1:
                raise KeyError("the user's")
            return loss

        def input_fn() -> Any:
            return tf.data.Dataset.range(9).map(lambda x: tf.cast(x, tf.float32))

        with contextlib.suppress(KeyError):
            if mode == "session":
                with tf.Graph().as_default():
                    repl.run(step_fn, input_fn)
            elif mode == "function":
                tf.function(lambda: repl.run(step_fn, input_fn))()
            else:
                repl.run(step_fn, input_fn)
                repl.run(step_fn, input_fn)

    first = tf.Graph() if mode == "session" else contextlib.nullcontext()
    with first.as_default() if mode == "session" else first:
        _in_function(tf.constant(1.0))  # it keeps its first trace
    for _ in range(3):
        cell()
    gc.collect()
    assert len(graphs) == 6
    assert [graph() for graph in graphs] == [None] * 6


def test_a_step_that_is_held_lives_without_its_functions_names() -> None:
    repl = helpers.make(2)
    step = repl.build(lambda x: tf.Variable(0.0) + x, lambda: tf.constant(2.0))
    for _ in range(2):
        gc.collect()
        assert [float(x) for x in step()] == [2.0, 2.0]


# --- Plans ----------------------------------------------------------------------------


def test_the_plan_of_a_step_is_made_without_running_it() -> None:
    repl = helpers.make(2)
    ran = []

    def step() -> Any:
        tf.py_function(lambda: ran.append(1), [], [])
        return repl.all_reduce(helpers.opaque(1.0))

    built = repl.build(step)
    assert [row.primitive for row in built.plan] == ["all_reduce"]
    assert built.plan is built.plan
    assert not ran
    assert built()[0].numpy() == 2.0
    assert len(ran) == 2


def test_a_step_in_a_graph_has_a_plan_once_it_is_built() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():
        built = repl.build(lambda: repl.broadcast(1.0))
        with pytest.raises(replicator.ContextError) as caught:
            _ = built.plan  # requested here
        message = str(caught.value)
        assert "the plan of a step was asked for before the step was built" in message
        assert f"{__file__.rpartition('/')[2]}:" in message
        assert (
            "Fix: call the step first, which builds it into the current graph"
            in message
        )
        built()
        assert [row.primitive for row in built.plan] == ["broadcast"]
