# SPDX-License-Identifier: Apache-2.0
"""What only finds numbers that a plan knows is not built, and no loop carries it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from replicator._tf import copying
from tests.forms import helpers

SPEC = [tf.TensorSpec([None, 4, 3])]


def _recurrent() -> tuple[Callable[..., Any], list[tf.Variable]]:
    """Returns a step of a small recurrent net that learns, and its weights."""
    weights = tf.Variable(np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            _, state = tf.while_loop(
                lambda t, state: t < 4,
                lambda t, state: (
                    t + 1,
                    tf.tanh(state @ weights + x[:, t]) * tf.sigmoid(state + x[:, t]),
                ),
                (0, tf.zeros_like(x[:, 0])),
            )
            loss = tf.reduce_mean(state**2)
        weights.assign_sub(tape.gradient(loss, weights))
        return loss

    return step, [weights]


def _counted(graph: tf.Graph) -> collections.Counter[str]:
    """Returns how many ops of each type a graph has, with the functions it calls."""

    def ops(graph: tf.Graph) -> Iterator[tf.Operation]:
        for op in graph.get_operations():
            yield op
            if op.type.endswith("While"):
                for name in ("cond", "body"):
                    yield from ops(copying.function_graph(op, name)[0])

    return collections.Counter(op.type for op in ops(graph))


def test_loops_carry_what_those_of_known_sizes_do() -> None:
    run, _ = helpers.run(_recurrent, SPEC, (5, 2), empty=True)
    built = _counted(run.function((0,)).graph)
    step, _ = _recurrent()
    fixed = _counted(tf.function(step).get_concrete_function(tf.ones([2, 4, 3])).graph)
    assert built["TensorListPushBack"] <= 2 * fixed["TensorListPushBack"] > 0
    assert built["TensorListPopBack"] <= 2 * fixed["TensorListPopBack"] > 0


def test_gradients_that_have_the_sizes_they_need_are_not_summed() -> None:
    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        def step(x: tf.Tensor) -> tf.Tensor:
            y = tf.sin(x)
            (slope,) = tf.gradients(x * y + y, [x])
            return slope

        return step, []

    run, _ = helpers.run(make, SPEC, (5, 2, 1, 0), empty=True)
    built = _counted(run.function((0,)).graph)
    assert built["Mul"] and not built["BroadcastGradientArgs"] + built["Sum"]


def test_what_nobody_reads_runs_if_it_has_an_effect() -> None:
    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        count = tf.Variable(0.0)

        def step(x: tf.Tensor) -> tf.Tensor:
            tf.exp(x)
            unread = count.assign_add(tf.reduce_sum(x)) + tf.reduce_max(tf.cos(x))
            assert unread is not None
            return x * 2.0

        return step, [count]

    run, _ = helpers.run(make, SPEC, (5, 2))
    built = _counted(run.function((0,)).graph)
    assert built["AssignAddVariableOp"] and not built["Exp"] + built["Cos"]
