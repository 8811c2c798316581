# SPDX-License-Identifier: Apache-2.0
"""Loops and conditionals without TensorFlow's preparations equal TensorFlow's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator._tf import bodies, effects, functions
from tests import helpers

X = np.arange(6, dtype=np.float32).reshape(3, 2)
ANY = tf.TensorShape([None, 2])


def test_loops_and_cases_are_of_tensorflow_2_whatever_is_the_default():
    with helpers.v1_control_flow(), tf.Graph().as_default() as graph:
        start = tf.compat.v1.placeholder_with_default(1, [])
        shape = tf.TensorShape([])
        (end,) = bodies.while_loop(
            lambda x: x < 100, lambda x: [x * 3], [start], [shape], 10
        )
        branches = [lambda: [end + 1], lambda: [end + 2], lambda: [end + 3]]
        chosen = bodies.branch(start, branches)
        with tf.compat.v1.Session() as session:
            assert session.run([end, *chosen]) == [243, 245]
    types = {op.type for op in graph.get_operations()}
    assert types & {"While", "StatelessWhile"} and types & {"Case", "StatelessCase"}
    assert not types & {"Switch", "Merge", "Enter", "NextIteration"}


def _step(loop: Any, case: Any, v: tf.Variable) -> Any:
    """Bodies that take tensors and variables from outside, and write."""

    def step(x: tf.Tensor) -> tf.Tensor:
        factor = x[0, 1] + 2.0  # taken by both functions of the loop
        limit = tf.cast(factor, tf.int32)

        def turn(k: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
            v.assign_add(tf.reduce_sum(y))
            return [k + 1, tf.concat([y * factor, y[:1] - v], 0)]

        k, y = loop(lambda k, y: k < limit, turn, [tf.constant(0), x])
        high = lambda: [v.assign(v * 2.0).read_value(), y * v]  # noqa: E731
        low = lambda: [factor, x - factor]  # noqa: E731
        a, b = case(tf.reduce_sum(y) > 0, high, low)
        (c,) = case(k % 2, lambda: [a + v], lambda: [tf.identity(factor)])
        return tf.reduce_sum(y), a, b, c, v.read_value()

    return step


def _tf_loop(condition: Any, body: Any, first: Any) -> Any:
    shapes = [tf.TensorShape([]), ANY]
    return tf.while_loop(condition, body, first, shape_invariants=shapes)


def _loop(condition: Any, body: Any, first: Any) -> Any:
    return bodies.while_loop(condition, body, first, [tf.TensorShape([]), ANY], 10)


def _tf_case(which: tf.Tensor, *branches: Any) -> Any:
    is_two = which.dtype == tf.bool
    result = tf.cond(which, *branches) if is_two else tf.switch_case(which, branches)
    return result if isinstance(result, list) else [result]


def _case(which: tf.Tensor, *branches: Any) -> Any:
    return bodies.branch(which, branches)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bodies_compute_and_write_what_those_of_tensorflow_do(sign: float) -> None:
    results = []
    for loop, case in ((_tf_loop, _tf_case), (_loop, _case)):
        v = tf.Variable(0.5)
        step = tf.function(_step(loop, case, v), autograph=False)
        spec = tf.TensorSpec(ANY, tf.float32)
        results.append(step.get_concrete_function(spec)(tf.constant(sign * X)))
    tf.nest.map_structure(np.testing.assert_allclose, *results)


def test_what_is_only_read_is_marked() -> None:
    v, w = tf.Variable(1.0), tf.Variable(2.0)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        read = lambda: [v * w]  # noqa: E731
        write = lambda: [w.assign_add(v).read_value()]  # noqa: E731
        (result,) = bodies.branch(x > 0, [read, write])
        return result

    graph = step.get_concrete_function(tf.constant(1.0)).graph
    (op,) = [op for op in graph.get_operations() if op.type == "If"]
    reads, writes = effects.resources_touched(op)
    handle = {id(outside): id(inside) for outside, inside in graph.captures}
    assert (reads, writes) == ({handle[id(v.handle)]}, {handle[id(w.handle)]})


def test_a_loop_that_only_reads_waits_for_nothing_and_is_inlined() -> None:
    v = tf.Variable(3.0)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        shape = tf.TensorShape([])
        (end,) = bodies.while_loop(
            lambda x: x < 100.0, lambda x: [x * v], [x], [shape], 10
        )
        v.assign(end)
        return end

    traced = step.get_concrete_function(tf.constant(1.0))
    (loop,) = [op for op in traced.graph.get_operations() if op.type == "While"]
    assert loop.get_attr("_lower_using_switch_merge")
    body, _ = functions.function_body(loop, "body")
    types = {op.type for op in body.get_operations()}
    assert types == {"Placeholder", "ReadVariableOp", "Mul"}
    assert traced(tf.constant(1.0)).numpy() == v.numpy() == 243.0


def test_in_a_session_only_the_branch_that_is_taken_runs() -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        fail = lambda: [tf.debugging.check_numerics(x / 0.0, "taken")]  # noqa: E731
        (result,) = bodies.branch(x > 0, [fail, lambda: [x - 1.0]])
        with tf.compat.v1.Session() as session:
            assert session.run(result, {x: -1.0}) == -2.0
            with pytest.raises(tf.errors.InvalidArgumentError, match="taken"):
                session.run(result, {x: 1.0})


def _functions(graph: Any) -> list[Any]:
    """Functions of one number: ten times it, and one more."""
    built = []
    for call in (lambda x: x * 10, lambda x: x + 1):
        function = functions.new_function_graph("body")
        (x,) = functions.add_inputs(function, [tf.constant(0)], [[]])
        with function.as_default():
            result = call(x)
        with graph.as_default():
            built.append(functions.finish_function(function, [result], []))
    return built


@pytest.mark.parametrize(
    ("is_case", "selector", "expected"),
    [(False, True, 30), (False, False, 4), (True, 0, 30), (True, 1, 4)],
)
def test_a_conditional_of_functions_that_exist(
    is_case: bool, selector: Any, expected: int
) -> None:
    with tf.Graph().as_default() as graph:
        op = bodies.add_conditional(
            tf.constant(selector),
            is_case,
            _functions(graph),
            [tf.constant(3)],
            [tf.int32],
            [tf.TensorShape([])],
            has_state=False,
        )
        assert op.type == ("StatelessCase" if is_case else "StatelessIf")
        with tf.compat.v1.Session() as session:
            assert session.run(op.outputs[0]) == expected


def test_what_is_lowered_says_so_and_is_the_op_that_was_added() -> None:
    with tf.Graph().as_default() as graph:
        times, _ = _functions(graph)
        op = bodies.add_lowered(
            tf.raw_ops.StatelessCase,
            branch_index=tf.constant(0),
            branches=[times],
            input=[tf.constant(3)],
            Tout=[tf.int32],
            output_shapes=[[]],
        )
        assert op.type == "StatelessCase" and op.get_attr("_lower_using_switch_merge")
