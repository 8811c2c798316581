# SPDX-License-Identifier: Apache-2.0
"""With several open tapes, control flow behaves as without them.

TensorFlow then wraps each conditional and loop in its own function. Unless the gradient
needs a value computed inside, that function's graph does not know the branches and
bodies; so the tests return these values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers
from tests.conformance.battery import CASES

Function = Callable[[tf.Tensor], tf.Tensor]


def _cond(f: Function, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(helpers.opaque(True), lambda: f(x), lambda: f(-x))


def _case(f: Function, x: tf.Tensor) -> tf.Tensor:
    no = (helpers.opaque(False), lambda: f(-x))
    return tf.case([no, (helpers.opaque(True), lambda: f(x))], lambda: f(x))


def _switch_case(f: Function, x: tf.Tensor) -> tf.Tensor:
    return tf.switch_case(helpers.opaque(1), [lambda: f(-x), lambda: f(x)])


def _while_loop(f: Function, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda k, _: k < helpers.opaque(1),
        lambda k, _: (k + 1, f(x)),
        (0, tf.zeros_like(f(x))),
    )[1]


def _loop_condition(f: Function, x: tf.Tensor) -> tf.Tensor:
    """A loop's condition communicates, and its value is returned."""
    return tf.while_loop(
        lambda k, _: f(tf.zeros_like(x))[0, 0] + tf.cast(k, x.dtype) < 1.0,
        lambda k, _: (k + 1, f(x)),
        (0, tf.zeros_like(f(x))),
    )[1]


def _in_a_function(f: Function, x: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda x: _cond(f, x), autograph=False)(x)


def _nested(f: Function, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(helpers.opaque(True), lambda: _while_loop(f, x), lambda: _cond(f, x))


PLACES = [_cond, _case, _switch_case, _while_loop, _in_a_function]
MORE = ["broadcast", "scatter", "groups_sum", "concat", "reduce_scatter_last"]


def _derivatives(f: Function, x: tf.Tensor, persistent: bool) -> list[tf.Tensor]:
    """Returns a loss, its gradient, and the gradient of the gradient's square."""
    with tf.GradientTape(persistent=persistent) as outer:
        outer.watch(x)
        with tf.GradientTape(persistent=persistent) as inner:
            inner.watch(x)
            y = f(x)
            loss = tf.reduce_sum(tf.sin(y)) * tf.reduce_sum(x * x)
        d = inner.gradient(loss, x)
        slope = tf.reduce_sum(d * d)
    return [loss, d, outer.gradient(slope, x)]


def _assert_as_at_the_top(
    names: list[str], place: Any, mode: str, persistent: bool = False
) -> None:
    repl = helpers.make(2)
    arrays = {name: CASES[name].inputs(2) for name in names}

    def step() -> dict[str, Any]:
        results = {}
        for name in names:
            x = helpers.opaque(arrays[name][repl.replica_id])

            def call(x: tf.Tensor, name: str = name) -> tf.Tensor:
                return CASES[name].run(repl, x)

            def inside(x: tf.Tensor, call: Function = call) -> tf.Tensor:
                return place(call, x)

            results[name] = [_derivatives(f, x, persistent) for f in (call, inside)]
        return results

    for name, (want, got) in helpers.run(mode, repl, lambda: step).items():
        for what, one, two in zip(("loss", "d", "dd"), got, want, strict=True):
            for r in range(2):
                np.testing.assert_allclose(
                    one[r], two[r], rtol=1e-12, atol=1e-12, err_msg=f"{name}, {what}"
                )


@pytest.mark.battery(5)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__.strip("_"))
def test_a_result_that_is_returned_as_it_is(place: Any) -> None:
    _assert_as_at_the_top(["sum"], place, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("mode", helpers.MODES)
def test_more_results_that_are_returned_as_they_are(mode: str) -> None:
    _assert_as_at_the_top(MORE, _cond, mode, persistent=True)


@pytest.mark.slow
def test_a_loop_in_a_conditional() -> None:
    _assert_as_at_the_top(["sum"], _nested, "eager")


def test_a_communicating_condition_of_a_loop() -> None:
    _assert_as_at_the_top(["sum"], _loop_condition, "session")


@pytest.mark.parametrize("mode", helpers.MODES)
def test_integers_that_a_group_reduces_in_a_loop_of_its_own(mode: str) -> None:
    """Integers are on no tape, but are in a loop that is wrapped all the same."""
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        x = helpers.opaque(2.0)
        with tf.GradientTape() as outer, tf.GradientTape() as inner:
            outer.watch(x)
            inner.watch(x)
            total = tf.constant(repl.replica_id + 1, tf.int64)
            if repl.replica_id < 2:
                group = repl.group([0, 1])
                _, total, _ = tf.while_loop(
                    lambda k, *_: k < helpers.opaque(3),
                    lambda k, n, y: (k + 1, repl.all_reduce(n, group=group), y),
                    (0, total, x),
                )
        return total

    assert list(helpers.run(mode, repl, lambda: step)) == [12, 12, 3]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_writes_are_seen(mode: str) -> None:
    """A variable that was made outside would be written once per replica, unseen."""
    repl = helpers.make(2)

    graph = tf.Graph().as_default() if mode == "session" else contextlib.nullcontext()
    with graph:
        outside = tf.Variable(1.0)

        def writes() -> tf.Tensor:
            x = helpers.opaque(1.0)
            with tf.GradientTape() as outer, tf.GradientTape() as inner:
                outer.watch(x)
                inner.watch(x)

                def branch() -> tf.Tensor:
                    tf.raw_ops.AssignAddVariableOp(resource=outside.handle, value=x)
                    return tf.identity(x)

                return tf.cond(helpers.opaque(True), branch, lambda: x)

        run = repl.run if mode != "function" else tf.function(repl.run)
        with pytest.raises(
            errors.ContextError, match=r"(?s)writes a variable .*test_tapes\.py:\d+ in"
        ):
            run(writes)


Outputs = Callable[[Any], tf.Tensor]


def _forward(f: Outputs, w: Any) -> Any:
    direction = tf.constant([1.0, 0.5])
    with tf.autodiff.ForwardAccumulator(w, direction) as accumulator:
        y = f(w)
    return accumulator.jvp(y)


def _reverse(f: Outputs, w: Any) -> Any:
    with tf.GradientTape() as tape:
        y = f(w)
    return tf.convert_to_tensor(tape.gradient(y, w))


def _jacobian(f: Outputs, w: Any) -> Any:
    with tf.GradientTape() as tape:
        y = f(w)
    return tape.jacobian(y, w)


DERIVATIVES: list[Callable[[Outputs, Any], Any]] = [
    lambda f, w: _forward(lambda w: _reverse(f, w), w),
    lambda f, w: _reverse(lambda w: _forward(f, w), w),
    lambda f, w: _reverse(lambda w: _reverse(lambda w: _forward(f, w), w) ** 2, w),
    lambda f, w: _jacobian(lambda w: _forward(f, w), w),
    lambda f, w: _forward(lambda w: _jacobian(f, w), w),
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", helpers.MODES)
def test_forward_mode_and_reverse_mode(mode: str) -> None:
    """TensorFlow computes each op's derivative by a function, and differentiates it."""
    repl = helpers.make(2)

    def outputs(replica_id: Any, w: Any) -> tf.Tensor:
        x = tf.reshape(tf.range(6.0) / 10, [3, 2]) + replica_id
        return tf.tanh(tf.linalg.matvec(x, w))

    def derivatives(replica_id: Any, w: Any) -> list[tf.Tensor]:
        f = functools.partial(outputs, replica_id)
        return [derivative(f, w) for derivative in DERIVATIVES]

    def make() -> Any:
        with repl.context():
            w = tf.Variable([1.0, 2.0])
        return lambda: derivatives(float(repl.replica_id), w)

    got = helpers.run(mode, repl, make)
    w = tf.Variable([1.0, 2.0])
    for r in range(2):
        for one, want in zip(got, derivatives(float(r), w), strict=True):
            np.testing.assert_allclose(one[r], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_reverse_over_forward_mode_through_communication(mode: str) -> None:
    repl = helpers.make(2)
    x = tf.reshape(tf.range(12.0) / 10, [6, 2])

    def directional(part: tf.Tensor, mean: Function, w: Any) -> tf.Tensor:
        def loss(w: Any) -> tf.Tensor:
            y = mean(tf.reduce_mean(tf.tanh(tf.linalg.matvec(part, w))))
            return y * tf.reduce_mean(tf.linalg.matvec(part, w) ** 2)

        return _reverse(lambda w: _forward(loss, w), w)

    def make() -> Any:
        with repl.context():
            w = tf.Variable([1.0, 2.0])

        def step() -> tf.Tensor:
            part = tf.reshape(tf.range(6.0) / 10, [3, 2]) + 0.6 * repl.replica_id
            return directional(part, lambda y: repl.all_reduce(y, "mean"), w)

        return step

    got = helpers.run(mode, repl, make)
    want = directional(x, lambda y: y, tf.Variable([1.0, 2.0]))
    np.testing.assert_allclose(sum(got) / 2, want, rtol=1e-5)
