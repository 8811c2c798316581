# SPDX-License-Identifier: Apache-2.0
"""Effects and errors in control flow that communicates.

What it computes is in tests/programs/control_flow.py and state.py.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors, strategy
from tests import helpers
from tests.conformance.battery import CASES


@pytest.mark.battery(2)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("place", ["body", "condition", "both"])
@pytest.mark.parametrize("counted", [True, False])
def test_effects_of_the_condition_happen_each_time_on_all_replicas(
    place: str, mode: str, counted: bool
) -> None:
    """Though the merged loop needs one replica's condition, and makes turns at once."""
    repl = helpers.make(2)
    log: list[tuple[int, int]] = []

    def make_step() -> Any:
        total = tf.Variable([0.0, 0.0])

        def step() -> tuple[tf.Tensor, tf.Tensor]:
            r = repl.replica_id
            last = 4 if counted else repl.all_reduce(helpers.opaque(2))

            def condition(n: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
                tf.numpy_function(lambda n: log.append((r, int(n))), [n], [])
                if place != "body":
                    total.assign_add(repl.all_reduce([1.0, float(r)]))
                return n < last

            def body(n: tf.Tensor, x: tf.Tensor) -> Any:
                return n + 1, x if place == "condition" else repl.all_reduce(x)

            x = tf.while_loop(condition, body, [0, helpers.opaque(1.0)])[1]
            return x, total.read_value()

        return step

    x, total = helpers.run(mode, repl, make_step)
    assert sorted(log) == [(r, n) for r in range(2) for n in range(5)]
    assert [float(y) for y in x] == [1.0 if place == "condition" else 16.0] * 2
    for values in total:
        assert values.tolist() == ([0.0, 0.0] if place == "body" else [10.0, 5.0])


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_function_without_results_runs_for_its_effects(mode: str) -> None:
    repl = helpers.make(2)
    log: list[float] = []

    def step() -> tf.Tensor:
        x = helpers.opaque(repl.replica_id + 1.0)

        @tf.function
        def function(x: tf.Tensor) -> None:
            tf.py_function(lambda y: log.append(float(y)), [repl.all_reduce(x)], [])

        function(x)
        return x

    helpers.run(mode, repl, lambda: step)
    assert log == [3.0, 3.0]


def test_an_error_while_tracing_leaves_the_next_build_in_step() -> None:
    """Replica 0 has traced the function by then, and replica 1 has not."""
    repl = helpers.make(2)
    function = tf.function(lambda x: repl.all_reduce(x) * 2.0)
    fail = [True]

    def step() -> tf.Tensor:
        x = repl.all_reduce(tf.constant(1.0))
        if repl.replica_id == 0:
            x = function(x)
        if fail:
            raise ValueError("not yet")
        if repl.replica_id == 1:
            x = function(x)
        return repl.all_reduce(x)

    with pytest.raises(ValueError, match="not yet"):
        repl.run(step)
    fail.clear()
    assert [float(y) for y in repl.run(step)] == [16.0, 16.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_an_assertion_that_fails_in_a_loop_says_so(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        def turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            tf.debugging.assert_less(n * repl.replica_id, 2, message="too far")
            return n + 1, repl.all_reduce(x)

        x = helpers.opaque(1.0)
        return tf.while_loop(lambda n, x: n < 4, turn, [tf.constant(0), x])[1]

    with pytest.raises(tf.errors.InvalidArgumentError, match="too far"):
        helpers.run(mode, repl, lambda: step)


def test_iterators_of_other_lengths_are_an_error_that_says_who_went_on() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        total = tf.constant(0, tf.int64)
        for n in iter(tf.data.Dataset.range(3 + repl.replica_id)):
            total = repl.all_reduce(total + n)
        return total

    with pytest.raises(tf.errors.InvalidArgumentError, match="replica"):
        repl.run(step)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_writes_under_several_tapes_are_seen(mode: str) -> None:
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
            errors.ContextError,
            match=r"(?s)writes a variable .*test_effects\.py:\d+ in",
        ):
            run(writes)


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", CASES)
def test_a_function_of_an_unknown_rank_that_its_caller_knows(name: str) -> None:
    """TensorFlow knows the rank only when the function is called."""
    case = CASES[name]
    repl, arrays = helpers.make(3), case.inputs(3)
    spec = [tf.TensorSpec(None, tf.float64)]
    function = tf.function(lambda x: case.run(repl, x), input_signature=spec)

    got = repl.run(lambda: function(tf.constant(arrays[repl.replica_id])))
    want = case.plain([tf.constant(array) for array in arrays])
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12)


def _with_given_gradients(function: Any) -> Any:
    @tf.custom_gradient
    def given(x: tf.Tensor) -> Any:
        def backward(d: tf.Tensor, variables: Any) -> Any:
            assert len(variables) == 1
            return d * tf.convert_to_tensor(variables[0]), [d * x]

        return function(x), backward

    return given


@pytest.mark.parametrize(
    "options",
    [{"variables": "mirrored"}, {"strategy": strategy.PartitionedPS()}],
    ids=["mirrored", "in parts"],
)
@pytest.mark.parametrize("wrap", [tf.recompute_grad, _with_given_gradients])
def test_variables_are_found_in_a_session(wrap: Any, options: Any) -> None:
    """TensorFlow looks for them by the names of the ops that make their handles."""
    with tf.Graph().as_default():
        repl = helpers.make(2, **options)
        with repl.context():
            variable = tf.Variable([1.0, 2.0])

        def step() -> Any:
            x = tf.constant([3.0, 4.0]) * (repl.replica_id + 1.0)
            with tf.GradientTape() as tape:
                y = wrap(lambda x: x * variable)(x)
            return tape.gradient(y, variable)

        got = repl.run(step)
        with helpers.session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            np.testing.assert_array_equal(session.run(list(got)), [[3, 4], [6, 8]])
