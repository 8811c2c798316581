# SPDX-License-Identifier: Apache-2.0
"""Inputs end on every replica or on none, and the last step then has no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from tests import helpers

# The number of elements of each replica; the shortest decides.
LENGTHS = {"first is short": (2, 3, 4), "last is short": (4, 3, 2), "even": (2, 2, 2)}
MODES = ("eager", "function", "session", "monitored session")


class _Effects:
    """A step with all kinds of writes, most of them independent of its input."""

    def __init__(self, repl: replicator.Replicator) -> None:
        self._repl = repl
        self.calls: list[int] = []
        with repl.context():
            self.variables = {
                "from the input": tf.Variable(0.0),
                "from nothing": tf.Variable(0.0),
                "an integer": tf.Variable(0, dtype=tf.int64),
                "ON_READ": tf.Variable(
                    0.0,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                ),
                "reduced": tf.Variable(0.0),
                "scattered": tf.Variable([0.0, 0.0]),
            }

    def step(self, element: tf.Tensor) -> tf.Tensor:
        """Adds to each variable a per-step value that is the same on every replica."""
        variables = self.variables
        one = tf.ones([])
        variables["from nothing"].assign_add(one)
        variables["from the input"].assign_add(tf.cast(element >= 0, tf.float32))
        variables["an integer"].assign_add(1)
        variables["ON_READ"].assign_add(one / self._repl.num_replicas)
        variables["reduced"].assign_add(self._repl.all_reduce(one, "mean"))
        variables["scattered"].scatter_add(tf.IndexedSlices([1.0, 1.0], [0, 1]))
        tf.py_function(lambda: self.calls.append(0), [], [])
        return element

    def check(self, steps: int, read: Callable[[Any], Any]) -> None:
        """Asserts that all of it happened `steps` times, on every replica."""
        for name, variable in self.variables.items():
            count = self._repl.num_replicas if name == "ON_READ" else 1
            for component in variable.components:
                assert read(component) * count == pytest.approx(steps), name
        assert len(self.calls) == steps * self._repl.num_replicas


def _input_fn(lengths: tuple[int, ...]) -> Callable[..., tf.data.Dataset]:
    return lambda ctx: tf.data.Dataset.range(lengths[ctx.replica_id])


@pytest.mark.battery(5)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("mode", MODES)
def test_the_step_without_all_inputs_changes_nothing(mode, lengths):
    repl = helpers.make(3)
    if "session" not in mode:
        effects = _Effects(repl)
        call = repl.build(effects.step, _input_fn(lengths))
        call = tf.function(call) if mode == "function" else call
        for _ in range(2):
            call()
        for _ in range(3):
            with pytest.raises(tf.errors.OutOfRangeError):
                call()
            effects.check(2, lambda component: component.numpy())
        return
    with tf.Graph().as_default():
        effects = _Effects(repl)
        fetches = repl.run(effects.step, _input_fn(lengths))
        with tf.compat.v1.Session() as plain:
            session = plain
            if mode == "monitored session":
                session = tf.compat.v1.train.MonitoredSession()
            else:
                session.run(tf.compat.v1.global_variables_initializer())
                repl.initialize(session)
            for _ in range(2):
                session.run(fetches)
            for _ in range(3):
                with pytest.raises(tf.errors.OutOfRangeError):
                    session.run(fetches)
                if mode == "session":  # a monitored session closes at the first error
                    effects.check(2, session.run)
                else:
                    assert len(effects.calls) == 2 * 3
                    break


@pytest.mark.parametrize("given", [{}, {"steps_per_call": 2}], ids=str)
def test_the_error_says_what_has_ended_and_nothing_of_the_library(given):
    step = helpers.make(2).build(lambda x: x, _input_fn((4, 3)), **given)
    with pytest.raises(tf.errors.OutOfRangeError) as raised:
        while True:
            step()
    message, line, fix = str(raised.value).splitlines()
    assert message.startswith("End of sequence: the inputs of the step are exhausted")
    assert line.startswith("  at tests/test_exhaustion.py:") and "repeat()" in fix


@pytest.mark.parametrize("scope", ["inputs/", "inputs", "element_1"])
def test_an_iterator_of_the_users_own_is_no_input(scope):
    """Whatever its name scope: the step may have changed something before it ended."""
    repl = helpers.make(2)
    with repl.context():
        count = tf.Variable(0)
    own = iter(tf.data.Dataset.range(3))

    def step_fn(x):
        written = count.assign_add(1)
        with tf.name_scope(scope), tf.control_dependencies([written.op]):
            return own.get_next() + x

    step = repl.build(step_fn, lambda: tf.data.Dataset.range(8))
    step()
    with pytest.raises(tf.errors.OutOfRangeError) as raised:
        step()
    assert "inputs of the step are exhausted" not in str(raised.value)


def test_the_error_says_which_steps_of_a_call_are_done():
    """Those before the end have changed variables."""
    repl = helpers.make(2)
    with repl.context():
        count = tf.Variable(0)
    for steps, says in ((1, "this call has changed nothing"), (3, "2 at most, are")):
        step = repl.build(
            lambda x: count.assign_add(1) + x,
            lambda: tf.data.Dataset.range(8, output_type=tf.int32),
            steps_per_call=steps,
        )
        count.assign(0)
        with pytest.raises(tf.errors.OutOfRangeError, match=says):
            while True:
                step()
        assert count.numpy() == 4


@pytest.mark.parametrize("input_mode", ["per_replica", "per_worker"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_dealt_dataset_ends_for_all(mode, input_mode):
    repl = helpers.make(3)
    effects = _Effects(repl)
    call = repl.build(effects.step, lambda: tf.data.Dataset.range(8), input_mode)
    call = tf.function(call) if mode == "function" else call
    for _ in range(2):
        call()
    for _ in range(2):
        with pytest.raises(tf.errors.OutOfRangeError):
            call()
        effects.check(2, lambda component: component.numpy())


def test_a_loop_in_a_function_ends_at_the_last_whole_step():
    repl = helpers.make(3)
    effects = _Effects(repl)

    @tf.function
    def loop():
        for _ in tf.range(100):
            repl.run(effects.step, _input_fn((4, 3, 5)))

    with pytest.raises(tf.errors.OutOfRangeError):
        loop()
    effects.check(3, lambda component: component.numpy())


@pytest.mark.parametrize("dealt", [True, False], ids=["dealt", "sharded"])
@pytest.mark.parametrize("mode", ["eager", "session"])
def test_eight_replicas_always_end_by_out_of_range(mode, dealt):
    """Iterators that run concurrently would sometimes cancel each other."""
    repl = helpers.make(8)
    rounds = 20

    def sharded(ctx):
        return tf.data.Dataset.range(1 + ctx.replica_id % 3)

    def step_fn(x):
        return repl.all_reduce(tf.cast(x, tf.float32), "sum")

    input_fn = (lambda: tf.data.Dataset.range(12)) if dealt else sharded
    if mode == "eager":
        call = repl.build(step_fn, input_fn)
        for _ in range(rounds):
            call()
            with pytest.raises(tf.errors.OutOfRangeError):
                call()
            call.initialize()
        return
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fetches = repl.run(step_fn, input_fn)
        for _ in range(rounds):
            repl.initialize(session)
            session.run(fetches)
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(fetches)
