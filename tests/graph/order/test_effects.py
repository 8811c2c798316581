# SPDX-License-Identifier: Apache-2.0
"""Side effects: complete, in order within a replica, and never in a circle."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from replicator import DeadlockError
from tests import helpers, sampling

# --- Between collectives -------------------------------------------------------------

EFFECTS = {
    "print": lambda x: tf.print("", end="", output_stream="file:///dev/null"),
    "check_numerics": lambda x: tf.debugging.check_numerics(x, "NaN"),
    "assertion": lambda x: tf.debugging.assert_less(x, 1e9),
    "Assert": lambda x: tf.debugging.Assert(x < 1e9, [x]),
    "py_function": lambda x: tf.py_function(lambda _: None, [x], []),
    "numpy_function": lambda x: tf.numpy_function(np.sin, [x], tf.float32),
    "random": lambda x: tf.random.uniform([]),
    "conditional": lambda x: tf.cond(
        x > 0, lambda: tf.print("", end="", output_stream="file:///dev/null"), tf.no_op
    ),
}


@pytest.mark.battery(6)
@pytest.mark.parametrize(
    ("name", "mode", "replicas"), sampling.in_turn([*EFFECTS], helpers.MODES, [2, 3])
)
def test_an_effect_between_collectives_makes_no_circle(name, mode, replicas):
    repl, effect = helpers.make(replicas), EFFECTS[name]

    def step_fn():
        x = tf.constant(1.0)
        for _ in range(3):
            effect(x)
            x = repl.all_reduce(x, "sum")
            effect(x)
        return x

    values = helpers.run(mode, repl, lambda: step_fn, steps=2)
    assert [float(v) for v in values] == [replicas**3] * replicas


def test_notes_around_a_step_in_a_function_are_in_order():
    repl = helpers.make(2)
    order: list[str] = []

    def note(what: str) -> None:
        tf.py_function(lambda: order.append(what), [], [])

    def step_fn():
        repl.all_reduce(1.0, "sum")
        note("step")

    @tf.function
    def surrounded():
        note("before")
        repl.run(step_fn)
        note("after")

    for _ in range(20):
        surrounded()
    assert order == ["before", "step", "step", "after"] * 20


# --- Reads and writes ----------------------------------------------------------------


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_late_read_of_one_replica_is_not_passed_by_the_update_of_another(mode):
    """The value that all_reduce sends waits for nobody's update."""
    repl = helpers.make(4)

    def make_step():
        variable = tf.Variable([1.0] * 1000)

        def step_fn():
            x = variable * 1.0
            if repl.replica_id == 3:
                for _ in range(50):
                    x = tf.sin(tf.cos(x)) * 0.0 + variable
            total = repl.all_reduce(x, "sum")
            variable.assign(total)
            return total[0]

        return step_fn

    values = helpers.run(mode, repl, make_step, steps=5)
    assert [float(v) for v in values] == [4.0**5] * 4


@pytest.mark.parametrize("mode", helpers.MODES)
def test_control_dependencies_hold_through_a_collective(mode):
    """Ops after replica 1's result also wait for replica 0's control inputs."""
    repl = helpers.make(2)
    order: list[str] = []

    def slow(x):
        time.sleep(0.1)
        order.append("before")
        return x

    def step_fn():
        before = []
        if repl.replica_id == 0:
            before = [tf.py_function(slow, [1.0], tf.float32)]
        with tf.control_dependencies(before):
            total = repl.all_reduce(1.0, "sum")
        with tf.control_dependencies([total]):
            if repl.replica_id == 1:
                tf.py_function(lambda: order.append("after"), [], [])
        return total

    helpers.run(mode, repl, lambda: step_fn)
    assert order == ["before", "after"]


# --- Summaries and tables ------------------------------------------------------------


def _summaries(folder: Any) -> list[tuple[str, int, float]]:
    """Returns (tag, step, value) of all scalars written under a folder."""
    scalars = []
    for path in sorted(folder.glob("*tfevents*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                scalar = float(tf.make_ndarray(value.tensor))
                scalars.append((value.tag, event.step, scalar))
    return scalars


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_summaries_are_written_in_a_step(mode, tmp_path):
    """Each once, by the first replica that writes one of that name."""
    repl = helpers.make(2)
    writer = tf.summary.create_file_writer(str(tmp_path))
    with repl.context():
        count = tf.Variable(0, dtype=tf.int64)

    def step_fn():
        with writer.as_default():
            tf.summary.scalar("all", repl.replica_id, step=count)
            with tf.summary.record_if(count < 2):
                tf.summary.scalar("some", repl.replica_id, step=count)
            tf.function(lambda: tf.summary.scalar("inner", 5.0, step=count))()
            tf.summary.scalar(f"own_{repl.replica_id}", repl.replica_id, step=count)
            loss = repl.all_reduce(1.0, "sum")
            if repl.replica_id == 1:
                tf.summary.scalar("loss", loss, step=count)
        count.assign_add(1)

    call = repl.build(step_fn)
    call = tf.function(call) if mode == "function" else call
    for _ in range(3):
        call()
    writer.close()
    expected = [
        (tag, step, value)
        for step in range(3)
        for tag, value in [
            ("replica_0/all", 0.0),
            ("replica_0/some", 0.0),
            ("inner", 5.0),
            ("replica_0/own_0", 0.0),
            ("replica_1/own_1", 1.0),
            ("replica_1/loss", 2.0),
        ]
        if not (tag.endswith("some") and step == 2)
    ]
    assert sorted(_summaries(tmp_path)) == sorted(expected)


def test_a_fixed_step_of_summaries_is_warned_of(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(logging, "log_first_n", lambda *about: messages.append(about))
    repl = helpers.make(2)
    call = repl.build(lambda x: tf.summary.scalar("x", x), args=(1.0,))
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=7):
        call()
    level, message, count, *about = messages[0]
    assert (level, count) == (logging.WARNING, 1)
    said = message % tuple(about)
    assert "at tests/graph/order/test_effects.py:" in said, said
    assert "the step of tf.summary is 7, a Python number" in said, said
    assert "tf.summary.experimental.set_step" in said, said
    messages.clear()
    step = tf.Variable(7, dtype=tf.int64)
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=step):
        repl.run(lambda x: tf.summary.scalar("x", x), args=(1.0,))
    assert not messages


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_table_that_all_replicas_write_makes_no_circle(mode):
    """One resource, read before a collective and written after it, by every replica."""
    repl = helpers.make(2)

    def make_step():
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

        def step_fn():
            key = tf.constant(repl.replica_id, tf.int64)
            value = table.lookup(key)
            total = repl.all_reduce(value + 1.0, "sum")
            table.insert(key, total)
            return total

        return step_fn

    values = helpers.run(mode, repl, make_step, steps=3)
    assert [float(v) for v in values] == [14.0, 14.0]  # 2, 6, 14


# --- Tensors of another replica ------------------------------------------------------

MESSAGE = (
    r"(?s)uses a tensor of another replica.*created at .*test_effects\.py:\d+ in \w+ .*"
    r"used at .*test_effects\.py:\d+ in \w+ .*Fix: do not keep tensors"
)


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("how", ["input", "control", "conditional", "gradient"])
def test_a_tensor_kept_from_another_replica_cannot_deadlock(how, mode):
    """Replica 0's result is an operand of replica 1's call."""
    repl = helpers.make(2)
    kept: list[tf.Tensor] = []

    def step_fn():
        x = tf.constant(1.0)
        if repl.replica_id == 1:
            if how == "input":
                x = x + kept[-1]
            elif how == "control":
                with tf.control_dependencies([kept[-1]]):
                    x = tf.constant(2.0) * x
            elif how == "conditional":
                x = tf.cond(x > 0, lambda: kept[-1] * 1.0, lambda: x)
            else:
                x = tf.gradients(x * x, x, kept[-1])[0]
        kept.append(repl.all_reduce(x, "sum"))
        return kept[-1]

    with pytest.raises(DeadlockError, match=MESSAGE) as caught:
        helpers.run(mode, repl, lambda: step_fn)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("place", ["conditional", "loop", "function", "write"])
def test_nor_can_one_where_replicas_communicate_in_control_flow(place, mode):
    repl = helpers.make(2, variables="sharded")
    kept: list[tf.Tensor] = []

    def make_step():
        variable = tf.Variable([0.0, 0.0])

        def step_fn():
            x = kept[-1] if repl.replica_id else helpers.opaque([1.0, 2.0])
            equal = tf.random.stateless_uniform([], [1, 2]) < 2.0
            if place == "conditional":
                x = tf.cond(equal, lambda: repl.all_reduce(x), lambda: x)
            elif place == "loop":
                x = tf.while_loop(
                    lambda n, x: n < 2,
                    lambda n, x: (n + 1, repl.all_reduce(x)),
                    [0, x],
                )[1]
            elif place == "function":
                x = tf.function(repl.all_reduce)(x)
            else:
                x = tf.cond(
                    equal, lambda: variable.assign_add([1.0, 1.0]) + x, lambda: x
                )
            kept.append(x)
            return x

        return step_fn

    with pytest.raises(DeadlockError, match=MESSAGE):
        helpers.run(mode, repl, make_step)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_kept_tensor_that_waits_for_nobody_is_right(mode):
    repl = helpers.make(3)
    kept: dict[str, tf.Tensor] = {}

    def step_fn():
        if repl.replica_id == 0:
            kept["constant"] = tf.constant(5.0) * 2.0
        total = repl.all_reduce(kept["constant"] + repl.replica_id, "sum")
        if repl.replica_id == 0:
            kept["total"] = total
        return kept["total"] + repl.replica_id  # after the last communication

    values = helpers.run(mode, repl, lambda: step_fn)
    assert [float(v) for v in values] == [33.0, 34.0, 35.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_kept_tensor_is_refused_or_right(mode):
    """Replica 1 passes replica 0's first result to the second communication."""
    repl = helpers.make(2)
    kept: list[tf.Tensor] = []

    def step_fn():
        total = repl.all_reduce(1.0, "sum")
        with tf.control_dependencies([total]):
            kept.append(tf.constant(3.0) * 1.0)
        first = kept[-2] if repl.replica_id == 1 else kept[-1]
        return repl.all_reduce(first, "sum")

    try:
        values = helpers.run(mode, repl, lambda: step_fn)
    except DeadlockError:
        return
    assert [float(v) for v in values] == [6.0, 6.0]
