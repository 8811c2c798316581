# SPDX-License-Identifier: Apache-2.0
"""A copy of a function's body computes the same, and is independent of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from replicator.graph.lowering import inline


def _copied(function: Any, *values: Any) -> tuple[Any, inline.InlinedFunction]:
    """Copies a traced function into another one; returns its results, and the copy."""
    graph = function.graph
    captured = [outside for outside, _ in graph.captures]
    copies: list[inline.InlinedFunction] = []

    @tf.function
    def outer() -> Any:
        arguments = [*map(tf.constant, values), *captured]
        arguments = [tf.identity(t) if t.dtype != tf.resource else t for t in arguments]
        outer_graph = tf.compat.v1.get_default_graph()
        arguments = [outer_graph.capture(t) for t in arguments]
        copy = inline.copy(graph, graph.outputs, arguments, "copied")
        copies.append(copy)
        with tf.control_dependencies(copy.must_run):
            return [tf.identity(result) for result in copy.results]

    return outer(), copies[-1]


def test_the_copy_computes_what_the_function_does() -> None:
    inner = tf.function(lambda x: x * x)

    @tf.function
    def function(x: tf.Tensor, y: tf.Tensor) -> Any:
        larger = tf.cond(x[0] > 0, lambda: x + y, lambda: x - y)
        return inner(larger), tf.reduce_sum(y)

    spec = tf.TensorSpec([2])
    concrete = function.get_concrete_function(spec, spec)
    for x in ([1.0, 2.0], [-1.0, 2.0]):
        want = concrete(tf.constant(x), tf.constant([3.0, 4.0]))
        got, _ = _copied(concrete, x, [3.0, 4.0])
        for one, two in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, two)


def test_its_ops_are_in_the_order_in_which_they_were_built() -> None:
    concrete = tf.function(
        lambda x: tf.cos(tf.sin(x)) + tf.exp(x)
    ).get_concrete_function(tf.TensorSpec([]))
    inputs = {tensor.op for tensor in concrete.graph.inputs}
    ops = [op for op in concrete.graph.get_operations() if op not in inputs]
    _, copy = _copied(concrete, 1.0)
    assert [op.name for op in copy.ops] == [f"copied/{op.name}" for op in ops]
    assert not set(copy.ops) & set(ops)


def test_a_result_that_is_an_argument_is_what_was_passed() -> None:
    concrete = tf.function(lambda x, y: (y, x)).get_concrete_function(
        tf.TensorSpec([]), tf.TensorSpec([])
    )
    got, _ = _copied(concrete, 1.0, 2.0)
    assert [float(x) for x in got] == [2.0, 1.0]


def test_what_runs_for_its_effect_is_said() -> None:
    variable = tf.Variable(1.0)

    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        variable.assign_add(x)
        return 2.0 * x

    concrete = function.get_concrete_function(tf.TensorSpec([]))
    got, copy = _copied(concrete, 3.0)
    assert [float(x) for x in got] == [6.0] and float(variable) == 4.0
    assert "AssignAddVariableOp" in {op.type for op in copy.must_run}


def test_ops_go_on_waiting_for_others() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.no_op("before")]):
            return tf.identity(x, "after")

    concrete = function.get_concrete_function(tf.TensorSpec([]))
    _, copy = _copied(concrete, 3.0)
    (after,) = [op for op in copy.ops if op.name == "copied/after"]
    assert [op.name for op in after.control_inputs] == ["copied/before"]
