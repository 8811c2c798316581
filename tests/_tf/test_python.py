# SPDX-License-Identifier: Apache-2.0
"""Python functions inside of graphs: each private name is called."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf

from replicator._tf import python


@pytest.mark.parametrize("numpy", [False, True])
def test_marked_python_functions_know_of_how_many_replicas(numpy):
    seen = []

    def function():
        seen.append(python.python_call())
        return np.float32(0.0)

    call = tf.numpy_function if numpy else tf.py_function

    @tf.function(autograph=False)
    def around(mark):
        result = call(function, [], tf.float32)
        if mark:
            python.mark_python_function(result.op, 3, "here")
        return result

    around(False), around(True)
    assert seen == [(0, ""), (3, "here")] and python.python_call() is None


def test_python_that_the_runtime_calls_is_told_from_others():
    seen = {}

    def note(where):
        seen[where] = python.python_call() is not None
        return 0.0

    def generate():
        yield note("generator")

    spec = tf.TensorSpec([], tf.float32)
    ends = tf.data.Dataset.from_generator(generate, output_signature=spec)
    list(ends.prefetch(1))
    dataset = tf.data.Dataset.range(2).map(
        lambda x: tf.py_function(lambda: note("py_function"), [], tf.float32),
        num_parallel_calls=2,
    )
    list(dataset)
    tf.py_function(lambda: note("eager"), [], tf.float32)
    note("plain")
    thread = threading.Thread(target=note, args=["thread"])
    thread.start()
    thread.join(30)
    inside = {"generator", "py_function", "eager"}
    assert seen == {where: where in inside for where in (*inside, "plain", "thread")}


def test_copied_python_functions_keep_what_their_gradients_need_apart() -> None:
    """TensorFlow keeps it under the token, which the gradient's function knows."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = tf.constant(2.0)
        y = tf.py_function(lambda x: x**2, [x], tf.float32)
        (d,) = tf.gradients(y, x)
        gradient = d.op if d.op.type == "EagerPyFunc" else d.op.inputs[0].op
        copies: dict[str, str] = {}
        tokens = [
            python.copy_python_function(op.get_attr("token").decode(), copies)
            for op in (gradient, y.op)
        ]
        assert len({*copies, *copies.values()}) == 4
        assert list(copies.values()) == [tokens[1], tokens[0]]

        def copied(op: tf.Operation, token: str, inputs: list[tf.Tensor]) -> tf.Tensor:
            (result,) = tf.raw_ops.EagerPyFunc(
                input=inputs, token=token, Tout=[tf.float32]
            )
            return result

        other = copied(y.op, tokens[1], [tf.constant(5.0)])
        with tf.control_dependencies([other, y]):
            ones = tf.constant(1.0)
            slopes = [
                copied(gradient, token, [ones])
                for token in (tokens[0], gradient.get_attr("token"))
            ]
    with v1.Session(graph=graph) as session:
        assert session.run([y, other, *slopes]) == [4.0, 25.0, 10.0, 4.0]
