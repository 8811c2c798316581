# SPDX-License-Identifier: Apache-2.0
"""Control flow as TensorFlow builds it: each private name is called."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from replicator._tf import control_flow
from tests import helpers


def test_is_compiled_tells_functions_of_xla_from_all_else():
    seen = []

    def note(*_):
        seen.append(control_flow.is_compiled(tf.compat.v1.get_default_graph()))
        return tf.constant(1)

    tf.function(note)()
    tf.function(note, jit_compile=True).get_concrete_function()
    tf.function(lambda: tf.while_loop(lambda x: x < 1, note, [tf.constant(0)]))()
    assert seen == [False, True, False]


def test_a_loop_gradient_is_the_body_of_a_loop():
    seen = []

    @tf.custom_gradient
    def noted(x):
        def gradient(upstream):
            seen.append(control_flow.is_loop_gradient(tf.compat.v1.get_default_graph()))
            return upstream

        seen.append(control_flow.is_loop_gradient(tf.compat.v1.get_default_graph()))
        return tf.identity(x), gradient

    @tf.function
    def train(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda x: x < 9.0, lambda x: noted(x) * 2.0, [x])
        return tape.gradient(y, x)

    train(tf.constant(1.0))
    assert seen[0] is False and seen[-1] is True


def test_compiled_function_finds_what_xla_compiles():
    seen = {}

    def look(name):
        graph = tf.compat.v1.get_default_graph()
        seen[name] = graph, control_flow.compiled_function(graph, outer.graph)

    @tf.function(jit_compile=True, autograph=False)
    def compiled(x):
        look("compiled")
        tf.cond(x > 0, lambda: (look("branch"), x)[1], lambda: x)
        return x

    @tf.function(autograph=False)
    def plain(x):
        look("plain")
        return x

    outer = tf.__internal__.FuncGraph("outer")
    with outer.as_default():
        outer.graph = outer
        x = helpers.opaque(1.0)
        look("outer")
        plain(x)
        compiled(x)
    assert seen["outer"][1] is None
    assert seen["plain"][1] is None
    function = seen["compiled"][0]
    assert seen["compiled"][1] is function
    assert seen["branch"][0] is not function
    assert seen["branch"][1] is function


def test_in_vectorized_body_is_true_in_a_body_and_functions_that_it_calls() -> None:
    seen = []

    def note(x: tf.Tensor) -> tf.Tensor:
        seen.append(control_flow.in_vectorized_body())
        return x + 1

    @tf.function(autograph=False)
    def function() -> tf.Tensor:
        with tf.name_scope("my_loop_body"):
            x = note(tf.constant([1, 2]))
        with tf.name_scope("any"):
            x = tf.vectorized_map(lambda k: tf.function(note)(note(k)), x)
        return note(tf.while_loop(lambda _: True, note, [x], maximum_iterations=1)[0])

    np.testing.assert_array_equal(function(), [6, 7])
    assert seen == [False, True, True, False, False]


def test_around_loops_is_what_the_outermost_loop_is_in() -> None:
    seen = []

    def body(k: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        seen.append(control_flow.around_loops(graph))
        return tf.cond(k > 0, lambda: inner(k), lambda: k + 1)

    def inner(k: tf.Tensor) -> tf.Tensor:
        seen.append(control_flow.around_loops(tf.compat.v1.get_default_graph()))
        return k + tf.while_loop(lambda n: n < 1, note, [tf.constant(0)])[0]

    def note(n: tf.Tensor) -> tf.Tensor:
        seen.append(control_flow.around_loops(tf.compat.v1.get_default_graph()))
        return n + 1

    @tf.function(autograph=False)
    def function() -> tf.Tensor:
        outer = tf.compat.v1.get_default_graph()
        assert control_flow.around_loops(outer) is None
        result = tf.while_loop(lambda k: k < 3, body, [tf.constant(0)])[0]
        assert [graph is outer for graph in seen] == [True] * 3
        return result

    assert function() == 3
