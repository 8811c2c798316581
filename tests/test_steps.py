"""Which functions count as the same step, and plans; more is in test_replicator.py."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import steps
from tests import helpers


class _Thing:
    def method(self) -> None:
        """Does nothing."""


def _holding(value: Any) -> Any:
    return lambda: value


def test_bound_methods_are_comparable_by_equality() -> None:
    one, two = _Thing(), _Thing()
    assert steps.comparable(one.method) == steps.comparable(one.method)
    assert steps.comparable(one.method) != steps.comparable(two.method)


def test_partials_are_comparable_by_what_they_are_made_of() -> None:
    def partial(*args: Any, **keywords: Any) -> Any:
        return steps.comparable(functools.partial(_holding, *args, **keywords))

    assert partial(1) == partial(1)
    assert partial(1) != partial(2)
    assert partial(value=1) == partial(value=1) != partial(value=2)


def test_functions_are_comparable_by_identity_unless_asked_by_content() -> None:
    value = object()
    one, two, other = _holding(value), _holding(value), _holding(object())
    assert steps.comparable(one) != steps.comparable(two)
    by_content = functools.partial(steps.comparable, by_content=True)
    assert by_content(one) == by_content(two) != by_content(other)


@pytest.mark.parametrize("by_content", [False, True])
def test_defaults_and_unhashable_arguments_tell_functions_apart(
    by_content: bool,
) -> None:
    functions = [lambda k=k: k for k in ("a", "b")]
    functions += [lambda *, k=k: k for k in ("a", "b")]
    functions += [functools.partial(_holding, [k]) for k in (1, 2)]
    keys = [steps.comparable(f, by_content) for f in functions]
    assert len(set(keys)) == len(functions)


def test_a_function_that_waits_for_its_variable_is_comparable() -> None:
    def recursive() -> Any:
        return later

    assert hash(steps.comparable(recursive, by_content=True))
    later = recursive
    assert later() is recursive


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


def test_threads_share_a_step_which_is_built_once() -> None:
    repl = helpers.make(2)
    step, count, built = _counting(repl)
    start = threading.Barrier(4)
    sums: list[int] = []

    def work() -> None:
        start.wait(30)
        sums.append(sum(int(sum(repl.run(step)["one"])) for _ in range(25)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == [50] * 4
    assert built == [0, 1]
    assert [int(value) for value in helpers.components(count)] == [100, 100]


def test_the_device_around_a_call_moves_nothing() -> None:
    repl = helpers.make(2)
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
    assert "Detected at node" in caught.value.message
    assert __file__ in caught.value.message


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
            _ = built.plan  # asked for here
        message = str(caught.value)
        assert "the plan of a step was asked for before the step was built" in message
        assert f"{__file__.rpartition('/')[2]}:" in message
        assert "Fix: call the step first, which builds it into the graph" in message
        built()
        assert [row.primitive for row in built.plan] == ["broadcast"]
