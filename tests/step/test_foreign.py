# SPDX-License-Identifier: Apache-2.0
"""Tensors that step_fn takes from elsewhere than its own replica."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tensorflow as tf

from replicator.errors import ContextError
from tests import helpers

KEPT = (
    r"(?s)replica 1 uses a tensor that belongs to replica 0 .*{origin}.*"
    r"used at .*test_foreign\.py:\d+ in \w+ .*Fix: do not keep tensors"
)
CREATED = r"created at .*test_foreign\.py:\d+ in \S+"


def inputs(context: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(tf.fill([2], 1.0 + context.replica_id)).repeat()


class Model(tf.Module):
    """Keeps what its calls compute, as models that were written for one device do."""

    def __init__(self) -> None:
        self.weight = tf.Variable(2.0)
        self.kept: dict[str, tf.Tensor] = {}

    @functools.cached_property
    def doubled(self) -> tf.Tensor:
        return 2.0 * self.weight

    def positions(self) -> tf.Tensor:
        if "positions" not in self.kept:
            self.kept["positions"] = tf.cast(tf.range(2), tf.float32) + 1.0
        return self.kept["positions"]


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize(
    ("how", "origin"),
    [
        ("variable", CREATED),
        ("input", "an input or argument of step_fn"),
        ("computed", CREATED),
        ("random", CREATED),
        ("inside", CREATED),
    ],
)
def test_a_value_kept_from_another_replica_is_refused(
    how: str, origin: str, mode: str
) -> None:
    repl = helpers.make(2, build="trace")

    def make_step() -> Any:
        model = Model()

        def step_fn(x: tf.Tensor) -> tf.Tensor:
            made = {
                "variable": lambda: model.doubled,
                "input": lambda: x,
                "computed": lambda: x - 1.0,
                "random": lambda: tf.random.normal([2]),
                "inside": lambda: x - 1.0,
            }[how]
            kept = model.kept.setdefault(how, made() if not model.kept else x)
            if how == "inside":
                return tf.cond(tf.reduce_sum(x) > 0, lambda: kept * 2.0, lambda: x)
            return kept * x

        return step_fn

    with pytest.raises(ContextError, match=KEPT.format(origin=origin)):
        helpers.run(mode, repl, make_step, inputs)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_constants_may_be_kept(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Any:
        model = Model()
        return lambda x: model.positions() * x * model.weight

    actual = helpers.run(mode, repl, make_step, inputs)
    assert [list(value) for value in actual] == [[2.0, 4.0], [4.0, 8.0]]


@pytest.mark.parametrize("primitive", ["all_reduce", "of a group", "reduce_scatter"])
def test_results_may_be_kept_if_they_are_the_same_on_all_replicas(
    primitive: str,
) -> None:
    repl = helpers.make(2, build="trace")
    alone = repl.group([0])
    kept: dict[str, tf.Tensor] = {}

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        if primitive == "of a group":
            if repl.replica_id == 0:
                kept["result"] = repl.all_reduce(x, group=alone)
            return kept["result"] * x
        result = getattr(repl, primitive)(x)
        return kept.setdefault("result", result / 2.0) * x

    if primitive != "all_reduce":
        with pytest.raises(ContextError, match=KEPT.format(origin=CREATED)):
            repl.run(step_fn, inputs)
        return
    actual = repl.run(step_fn, inputs)
    assert [list(value.numpy()) for value in actual] == [[1.5, 1.5], [3.0, 3.0]]


@pytest.mark.parametrize("where", ["before", "inside", "stopped", "of no variable"])
def test_gradients_that_go_back_beyond_the_step_are_refused(where: str) -> None:
    """With one device, w is 1 - 0.1 * (1 + 6w), or 1 - 0.1 if the penalty is fixed."""
    repl = helpers.make(2)
    with tf.Graph().as_default():
        with repl.context():
            w = tf.Variable(1.0)
            sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
            optimizer = repl.wrap_optimizer(sgd)
        outside = 3.0 * (w * w if where != "of no variable" else tf.zeros([]))

        def step_fn() -> Any:
            penalty = 3.0 * w * w if where == "inside" else outside
            if where == "stopped":
                penalty = tf.stop_gradient(penalty)
            return optimizer.minimize(w + penalty)

        if where == "before":
            with pytest.raises(
                ContextError, match=r"(?s)only replica 0 .*Fix: compute"
            ):
                repl.run(step_fn)
            return
        train = repl.run(step_fn)
        with helpers.monitored_session() as running:
            running.run(train)
            expected = 0.3 if where == "inside" else 0.9
            assert running.run(w) == pytest.approx(expected)


def test_what_all_replicas_differentiate_may_be_before_the_step() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():
        with repl.context():
            w = tf.Variable(2.0)
        read = tf.identity(w)
        square = read * read
        both = repl.run(lambda: tf.gradients(square * (1.0 + repl.replica_id), read)[0])
        with helpers.monitored_session() as running:
            assert running.run(both) == (4.0, 8.0)


def test_what_depends_on_no_variable_may_be_differentiated_by_one_replica() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():
        x = tf.constant(2.0)
        square = x * x

        def step_fn() -> tf.Tensor:
            if repl.replica_id == 0:
                return tf.gradients(square, x)[0]
            return tf.constant(0.0)

        each = repl.run(step_fn)
        with helpers.monitored_session() as running:
            assert running.run(each) == (4.0, 0.0)
