# SPDX-License-Identifier: Apache-2.0
"""Errors of wrapped optimizers, which leave everything unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from tests import helpers
from tests.optimizers import problem

v1 = tf.compat.v1
kopt = tf.keras.optimizers
legacy = tf_keras.optimizers

UNWRAPPED = {
    "keras": lambda: kopt.SGD(1.0),
    "keras_adam": lambda: kopt.Adam(1.0),
    "loss_scale": lambda: kopt.LossScaleOptimizer(kopt.SGD(1.0)),
    "legacy": lambda: legacy.SGD(1.0),
    "legacy_loss_scale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        legacy.Adam(1.0)
    ),
    "older": lambda: legacy.legacy.SGD(1.0),
    "older_adam": lambda: legacy.legacy.Adam(1.0),
    "v1": lambda: v1.train.GradientDescentOptimizer(1.0),
    "v1_adam": lambda: v1.train.AdamOptimizer(1.0),
    "sonnet": lambda: snt.optimizers.SGD(1.0),
    "sonnet_adam": lambda: snt.optimizers.Adam(1.0),
}


def _apply(optimizer: Any, gradient: Any, variable: tf.Variable) -> Any:
    if hasattr(optimizer, "apply"):
        return optimizer.apply([gradient], [variable])
    return optimizer.apply_gradients([(gradient, variable)])


# --- Refused in a step ---------------------------------------------------------------


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", UNWRAPPED)
def test_an_optimizer_that_is_not_wrapped_is_refused(name: str, mode: str) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        replicator.ReplicatorError, match=r"(?s)test_refused.py:\d+.*Fix: wrap"
    ):

        def make_step() -> Callable[[], Any]:
            with repl.context():
                w = tf.Variable(1.0)
                optimizer = UNWRAPPED[name]()
            return lambda: _apply(optimizer, tf.constant(1.0 + repl.replica_id), w)

        helpers.run(mode, repl, make_step)


def test_after_an_error_nothing_has_changed_and_later_builds_work() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)
        plain = kopt.SGD(1.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0, momentum=0.5))
    fail = [True]

    def step_fn() -> tf.Tensor:
        _apply(optimizer, tf.constant(2.0 * repl.replica_id), w)
        if fail[0] and repl.replica_id == 1:
            _apply(plain, tf.constant(1.0), w)
        return w.read_value()

    with pytest.raises(replicator.ContextError, match="SGD updates variable"):
        repl.run(step_fn)
    assert (w.numpy(), optimizer.iterations.numpy()) == (1.0, 0)
    fail[0] = False
    np.testing.assert_array_equal(repl.run(step_fn), [0.0, 0.0])
    assert optimizer.iterations.numpy() == 1
    helpers.assert_replicas_equal([w, *optimizer.variables])


def test_what_the_step_raises_passes_and_changes_nothing() -> None:
    class OwnError(Exception):
        pass

    repl, optimizer, w = problem.wrapped(lambda: kopt.SGD(1.0), 1.0)
    fail = [True]

    def step_fn() -> None:
        optimizer.apply([tf.constant(1.0)], [w])
        if fail[0]:
            raise OwnError("own")

    @tf.function
    def train() -> None:
        try:
            repl.run(step_fn)
        except OwnError:
            fail[0] = False
        repl.run(step_fn)

    with pytest.raises(OwnError) as caught:
        repl.run(step_fn)
    assert str(caught.value) == "own"  # its lines are a note beside it
    assert w.numpy() == 1.0
    train()  # the failed build is in this function's graph, without effect
    assert w.numpy() == 0.0
    assert optimizer.iterations.numpy() == 1


def test_no_gradient_on_any_replica_is_refused_as_without_us() -> None:
    repl, optimizer, w = problem.wrapped(lambda: kopt.SGD(1.0), 1.0)
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        repl.run(lambda: optimizer.apply([None], [w]))
    assert optimizer.iterations.numpy() == 0


# What each of two replicas applies: the optimizer, and its variables.
OTHERWISE: dict[str, Any] = {
    "variables": ([("a", "ab")], [("a", "ba")]),
    "fewer": ([("a", "ab")], [("a", "a")]),
    "optimizers": ([("a", "a"), ("b", "b")], [("b", "b"), ("a", "a")]),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_variables_in_another_order_are_refused(name: str) -> None:
    """With equal shapes they would pair silently, and wrongly."""
    repl = helpers.make(2)
    with repl.context():
        ws = {name: tf.Variable(1.0, name=name) for name in "ab"}
        optimizers = {name: repl.wrap_optimizer(kopt.SGD(1.0)) for name in "ab"}

    def step_fn() -> None:
        for optimizer, names in OTHERWISE[name][repl.replica_id]:
            one = [tf.constant(1.0)] * len(names)
            optimizers[optimizer].apply(one, [ws[own] for own in names])

    with pytest.raises(
        replicator.MismatchError,
        match=r"(?s)different variables.*replica 0 .*SGD, \d gradients?, of a.* at "
        r"\S*test_refused.py:\d+.*replica 1 .*Fix: ",
    ):
        repl.run(step_fn)
    assert [w.numpy() for w in ws.values()] == [1.0, 1.0]


def test_a_weight_goes_with_the_mean_only() -> None:
    repl, optimizer, w = problem.wrapped(lambda: kopt.SGD(1.0), 1.0, op="sum")
    with pytest.raises(
        replicator.ReplicatorError,
        match=r'(?s)SGD was given a weight on replica 0.*op="sum".*test_refused.py:'
        r'\d+.*Fix: weights go with op="mean"',
    ):
        repl.run(lambda: optimizer.apply([tf.constant(1.0)], [w], weight=2))


def test_keras_with_nothing_to_apply() -> None:
    """No gradients do nothing; without variables, an unbuilt optimizer knows none."""
    repl, optimizer, w = problem.wrapped(lambda: kopt.SGD(1.0), 1.0)
    repl.run(lambda: optimizer.apply([], [w]))
    assert optimizer.iterations.numpy() == 0
    with pytest.raises(ValueError, match="must already be built"):
        repl.run(lambda: optimizer.apply([tf.constant(1.0)]))
    optimizer.build([w])
    repl.run(lambda: optimizer.apply([tf.constant(0.5 + repl.replica_id)]))
    assert w.numpy() == 0.0


@pytest.mark.parametrize("count", [1, 3])
def test_keras_number_of_gradients(count: int) -> None:
    repl = helpers.make(2)
    with repl.context():
        ws = [tf.Variable(1.0), tf.Variable(1.0)]
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))
        optimizer.build(ws)
    grads = [tf.constant(1.0)] * count
    for variables in ([ws], []):
        step_fn = lambda v=variables: optimizer.apply(grads, *v)  # noqa: E731
        for run in (repl.run, lambda step_fn: step_fn()):
            with pytest.raises(
                replicator.ReplicatorError,
                match=rf"(?s)SGD .*was given {count} gradients for 2 variables.*Fix: ",
            ):
                run(step_fn)


@pytest.mark.parametrize(
    "option", [{"gradient_accumulation_steps": 2}, {"ema_overwrite_frequency": 2}]
)
@pytest.mark.parametrize("scaled", [False, True])
def test_keras_options_that_a_graph_loses_are_refused_there(
    option: dict[str, int], scaled: bool
) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        with repl.context():
            w = tf.Variable(1.0)
            optimizer = kopt.SGD(1.0, use_ema=True, **option)
            if scaled:
                optimizer = kopt.LossScaleOptimizer(optimizer)
            optimizer = repl.wrap_optimizer(optimizer)
        return lambda: optimizer.apply([tf.constant(1.0)], [w])

    (name,) = option
    with pytest.raises(
        replicator.ReplicatorError,
        match=rf"(?s){name} \(of SGD\) has no effect.*test_refused.py:\d+.*Fix: ",
    ):
        helpers.run("session", repl, make_step)


SKIP, AGGREGATE = "skip_gradients_aggregation", "experimental_aggregate_gradients"


@pytest.mark.parametrize(
    ("name", "combined", "own"),
    [
        ("legacy", {SKIP: True}, {SKIP: False}),
        ("legacy_loss_scale", {SKIP: True}, {SKIP: False}),
        ("legacy", {AGGREGATE: False}, {AGGREGATE: True}),
        ("older", {AGGREGATE: False}, {AGGREGATE: True}),
        ("legacy", (None, True), (None, False)),
        ("legacy_loss_scale", (True,), (False,)),
        ("older", (None, False), (None, True)),
        ("v1", (None, None, True), (None, None, False)),
    ],
)
def test_gradients_said_to_be_combined(name: str, combined: Any, own: Any) -> None:
    """A positional argument means what it means to the optimizer, never a weight."""
    repl, optimizer, w = problem.wrapped(UNWRAPPED[name], 1.0)

    def apply(more: Any) -> Any:
        args, kwargs = ((), more) if isinstance(more, dict) else (more, {})
        return optimizer.apply_gradients([(tf.constant(1.0), w)], *args, **kwargs)

    with pytest.raises(
        replicator.ReplicatorError,
        match=rf"(?s){type(optimizer).__name__} is wrapped.*already combined.*"
        r"test_refused.py:\d+.*Fix: leave out",
    ):
        repl.run(lambda: apply(combined))
    repl.run(lambda: apply(own))
    np.testing.assert_allclose(w.numpy(), 0.0, atol=1e-5)


# --- Refused by wrap_optimizer -------------------------------------------------------


@pytest.mark.parametrize("op", ["max", "Mean", None])
def test_bad_op(op: Any) -> None:
    with pytest.raises(
        replicator.ReplicatorError, match=rf"(?s)op={op!r}.*Fix: op is one of mean, sum"
    ):
        helpers.make(1).wrap_optimizer(kopt.SGD(), op=op)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, None, "2"])
def test_bad_accumulation_steps(steps: Any) -> None:
    with pytest.raises(
        replicator.ReplicatorError,
        match=rf"(?s)accumulation_steps={steps!r}.*Fix: .*positive int",
    ):
        helpers.make(1).wrap_optimizer(kopt.SGD(), accumulation_steps=steps)


@pytest.mark.parametrize(
    "thing",
    ["sgd", None, kopt.SGD, tf.Module()],
    ids=["name", "None", "class", "module"],
)
def test_not_an_optimizer(thing: Any) -> None:
    with pytest.raises(
        replicator.ReplicatorError,
        match=f"(?s)was given {type(thing).__name__}.*Fix: .*Keras 3.*all_reduce",
    ):
        helpers.make(1).wrap_optimizer(thing)


@pytest.mark.parametrize("name", UNWRAPPED)
def test_wrapped_twice(name: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        optimizer = repl.wrap_optimizer(UNWRAPPED[name]())
    with pytest.raises(
        replicator.ReplicatorError, match="(?s)already wrapped.*Fix: wrap"
    ):
        repl.wrap_optimizer(optimizer)


@pytest.mark.parametrize(
    "name", ["keras", "loss_scale", "legacy", "legacy_loss_scale", "sonnet_adam"]
)
def test_made_outside_the_context(name: str) -> None:
    optimizer = UNWRAPPED[name]()
    with pytest.raises(
        replicator.ContextError,
        match=rf"(?s){type(optimizer).__name__} holds variable .*outside the context"
        r".*test_refused.py:\d+.*Fix: .*repl.context",
    ):
        helpers.make(2).wrap_optimizer(optimizer)


@pytest.mark.parametrize("name", ["v1_adam", "older_adam", "sonnet"])
def test_without_variables_it_may_be_made_anywhere(name: str) -> None:
    repl = helpers.make(2)
    optimizer = repl.wrap_optimizer(UNWRAPPED[name]())
    with repl.context():
        w = tf.Variable(2.0)

    def step_fn() -> None:
        _apply(optimizer, tf.constant(0.5 + repl.replica_id), w)

    repl.run(step_fn)
    np.testing.assert_allclose(w.numpy(), 1.0, rtol=1e-5)
    helpers.assert_replicas_equal([w])


def test_variables_made_outside_the_context_are_refused_in_the_step() -> None:
    repl = helpers.make(2)
    w = tf.Variable(1.0)
    optimizer = repl.wrap_optimizer(snt.optimizers.SGD(1.0))
    with pytest.raises(replicator.ContextError, match="created outside the context"):
        repl.run(lambda: optimizer.apply([tf.constant(1.0)], [w]))
    assert w.numpy() == 1.0


def test_variables_of_a_strategy_are_refused_in_the_step() -> None:
    repl = helpers.make(2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        w = tf.Variable(1.0)
    with repl.context():
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))

    def step_fn() -> None:
        optimizer.apply([tf.constant(1.0)], [w])

    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)SGD on replica 0 was given variable .*tf.distribute strategy"
        r".*test_refused.py:\d+.*Fix: .*repl.context\(\)",
    ):
        repl.run(step_fn)
    assert w.numpy() == 1.0
