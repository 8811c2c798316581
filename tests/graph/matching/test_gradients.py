# SPDX-License-Identifier: Apache-2.0
"""Gradients of several losses, some of which depend on a call on one replica only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.errors import MismatchError
from replicator.graph.matching import gradients
from tests import helpers, sampling

CROSSED = (
    r"(?s)at .*test_gradients\.py:\d+ .*at .*test_gradients\.py:\d+ .*"
    r"Fix: .*tf\.reduce_sum"
)


def losses(repl: Any, x: tf.Tensor, y: tf.Tensor, everywhere: bool) -> list[tf.Tensor]:
    """Returns two losses; each depends on y, the sum of x, on one replica only."""
    both = [1.0 * y, 5.0 * x] if repl.replica_id == 0 else [7.0 * x, 10.0 * y]
    return [loss + 0.0 * y for loss in both] if everywhere else both


@pytest.mark.parametrize(
    ("everywhere", "by", "mode"),
    sampling.in_turn(
        [True, False], ["tape", "tf.gradients", "a function", "a loop"], helpers.MODES
    ),
)
def test_gradients_never_reach_another_loss(
    everywhere: bool, by: str, mode: str
) -> None:
    repl = helpers.make(2)

    def take(x: tf.Tensor) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = repl.all_reduce(x, "sum")
            first, second = losses(repl, x, y, everywhere)
        if by == "tf.gradients":
            of_first = tf.gradients(first, x)[0]
            of_second = tf.gradients(second, x)[0]
            return [of_first, of_second]
        if by == "a loop":
            return [tape.gradient(loss, x) for loss in (first, second)]
        return [tape.gradient(first, x), tape.gradient(second, x)]

    def make_step() -> Any:
        inner = tf.function(take) if by == "a function" else take
        return lambda: inner(tf.constant(1.0 + repl.replica_id))

    if everywhere:
        of_first, of_second = helpers.run(mode, repl, make_step)
        assert [float(v) for v in of_first] == [1.0, 8.0]
        assert [float(v) for v in of_second] == [15.0, 10.0]
        return
    with pytest.raises(MismatchError, match=CROSSED):
        helpers.run(mode, repl, make_step)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_replicas_may_take_a_gradient_at_lines_of_their_own(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Any:
        def step_fn() -> tf.Tensor | None:
            x = tf.constant(1.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = (1.0 + repl.replica_id) * repl.all_reduce(x, "sum")
            if repl.replica_id == 0:
                return tape.gradient(y, x)
            return tape.gradient(y, x)

        return step_fn

    assert [float(v) for v in helpers.run(mode, repl, make_step)] == [3.0, 3.0]


@pytest.mark.parametrize("one_loss", [0, 1])
def test_one_replica_takes_the_gradient_of_a_loss_that_the_other_lacks(
    one_loss: int,
) -> None:
    repl = helpers.make(2)

    def step_fn() -> list[Any]:
        x = tf.constant(1.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = repl.all_reduce(x, "sum")
            first, second = (
                (7.0 * y, x) if repl.replica_id == one_loss else (5.0 * x, y)
            )
        taken = [tape.gradient(first, x)]
        if repl.replica_id != one_loss:
            taken.append(tape.gradient(second, x))
        return [tf.add_n(taken)]

    with pytest.raises(MismatchError, match=CROSSED):
        repl.run(step_fn)


def test_passes_are_counted_by_line_and_calls_by_pass() -> None:
    """One pass reaches the call; those before it and after it do not."""
    repl = helpers.make(1)
    found = []

    def step_fn() -> tf.Tensor:
        x = tf.constant(2.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            losses = [x * x, repl.all_reduce(x, "sum"), 3.0 * x]
        for loss in losses:
            tape.gradient(loss, x)
        tape.gradient(losses, x)
        found.append(gradients.passes(x.graph.get_operations()))
        return x

    repl.run(step_fn)
    (passes,) = found
    assert sorted(passes.counts.values()) == [1, 3]
    assert sorted(passes.numbers.values()) == [1, 2]


_AROUND: dict[str, Callable[[Callable[[tf.Tensor], tf.Tensor], tf.Tensor], tf.Tensor]]
_AROUND = {
    "cond": lambda f, x: tf.cond(helpers.opaque(True), lambda: f(x), lambda: f(2 * x)),
    "case": lambda f, x: tf.case([(helpers.opaque(True), lambda: f(x))], lambda: 3 * x),
    "switch_case": lambda f, x: tf.switch_case(
        helpers.opaque(1), [lambda: f(x), lambda: f(f(x))]
    ),
    "while_loop": lambda f, x: tf.while_loop(
        lambda n, x: n < 2, lambda n, x: (n + 1, f(x)), [0, x]
    )[1],
    "function": lambda f, x: tf.function(f, autograph=False)(x),
    "cond in a loop": lambda f, x: _AROUND["while_loop"](
        lambda x: _AROUND["cond"](f, x), x
    ),
}


@pytest.mark.parametrize(
    ("around", "persistent"), sampling.in_turn([*_AROUND], [False, True])
)
def test_a_pass_through_control_flow_is_one(around: str, persistent: bool) -> None:
    """Gradients of control flow take gradients of their own, in its branches."""
    found = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(persistent=persistent) as outer:
            outer.watch(x)
            with tf.GradientTape(persistent=persistent) as inner:
                inner.watch(x)
                y = _AROUND[around](lambda x: tf.sin(x) * x, x)
            slope = inner.gradient(y, x) ** 2
        result = outer.gradient(slope, x)
        found.append(gradients.passes(x.graph.get_operations()))
        return result

    step(tf.constant(0.5))
    assert [*found[0].counts.values()] == [1, 1]
