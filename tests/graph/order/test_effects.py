# SPDX-License-Identifier: Apache-2.0
"""Effects happen once, in order; what replicas keep of one another cannot deadlock.

That effects and communication make no circle is a matter of tests/programs/writes.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from absl import logging

from replicator import DeadlockError
from tests import helpers, sampling


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


# --- Tensors of another replica -------------------------------------------------------

MESSAGE = (
    r"(?s)uses a tensor of another replica.*created at .*test_effects\.py:\d+ in \S+ .*"
    r"used at .*test_effects\.py:\d+ in \S+ .*Fix: do not keep tensors"
)


def _after(x: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([kept]):
        return tf.constant(2.0) * x


# How replica 1 computes with what replica 0 kept: a result of communication.
_USES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "an input": lambda x, kept: x + kept,
    "a control input": _after,
    "a capture": lambda x, kept: tf.cond(x[0] > 0, lambda: kept * 1.0, lambda: x),
    "a gradient": lambda x, kept: tf.gradients(x * x, x, kept)[0],
}


def _equal() -> tf.Tensor:
    return tf.random.stateless_uniform([], [1, 2]) < 2.0


# Where both replicas communicate, replica 1 with what it computed so.
_PLACES: dict[str, Callable[[Any, Any, tf.Tensor], tf.Tensor]] = {
    "the step": lambda repl, v, x: repl.all_reduce(x),
    "a conditional": lambda repl, v, x: tf.cond(
        _equal(), lambda: repl.all_reduce(x), lambda: x
    ),
    "a loop": lambda repl, v, x: tf.while_loop(
        lambda n, x: n < 2, lambda n, x: (n + 1, repl.all_reduce(x)), [0, x]
    )[1],
    "a function": lambda repl, v, x: tf.function(repl.all_reduce)(x),
    "a write": lambda repl, v, x: tf.cond(
        _equal(), lambda: v.assign_add([1.0, 1.0]) + x, lambda: x
    ),
}


@pytest.mark.parametrize(
    ("use", "place", "mode"), sampling.in_turn([*_USES], [*_PLACES], helpers.MODES)
)
def test_a_tensor_kept_from_another_replica_cannot_deadlock(
    use: str, place: str, mode: str
) -> None:
    repl = helpers.make(2, variables="sharded")
    kept: list[tf.Tensor] = []

    def make_step() -> Any:
        variable = tf.Variable([0.0, 0.0])

        def step_fn() -> tf.Tensor:
            x = helpers.opaque([1.0, 2.0])
            if repl.replica_id == 1:
                x = _USES[use](x, kept[-1])
            kept.append(_PLACES[place](repl, variable, x))
            return kept[-1]

        return step_fn

    with pytest.raises(DeadlockError, match=MESSAGE) as caught:
        helpers.run(mode, repl, make_step)
    assert isinstance(caught.value, ValueError)


def _waits_for_nobody(repl: Any, kept: dict[str, tf.Tensor]) -> tf.Tensor:
    if repl.replica_id == 0:
        kept["constant"] = tf.constant(5.0) * 2.0
    total = repl.all_reduce(kept["constant"] + repl.replica_id)
    if repl.replica_id == 0:
        kept["total"] = total
    return kept["total"] + repl.replica_id  # after the last communication


def _waits_for_the_first_call(repl: Any, kept: dict[str, tf.Tensor]) -> tf.Tensor:
    total = repl.all_reduce(1.0)
    if repl.replica_id == 0:
        with tf.control_dependencies([total]):
            kept["late"] = tf.constant(3.0) * 1.0
    return repl.all_reduce(kept["late"])  # the second call


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_kept_tensor_is_right_unless_it_waits_for_communication(mode: str) -> None:
    repl = helpers.make(3)
    step_fn = functools.partial(_waits_for_nobody, repl, {})
    assert [*helpers.run(mode, repl, lambda: step_fn)] == [33.0, 34.0, 35.0]
    step_fn = functools.partial(_waits_for_the_first_call, repl, {})
    with pytest.raises(DeadlockError, match=MESSAGE):
        helpers.run(mode, repl, lambda: step_fn)
