# SPDX-License-Identifier: Apache-2.0
"""Python functions inside of graphs: each private name is called."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import _tf


@pytest.mark.parametrize("numpy", [False, True])
def test_marked_python_functions_know_of_how_many_replicas(numpy):
    seen = []

    def function():
        seen.append(_tf.python_call())
        return np.float32(0.0)

    call = tf.numpy_function if numpy else tf.py_function

    @tf.function(autograph=False)
    def around(mark):
        result = call(function, [], tf.float32)
        if mark:
            _tf.mark_python_function(result.op, 3, "here")
        return result

    around(False), around(True)
    assert seen == [(0, ""), (3, "here")] and _tf.python_call() is None


def test_python_that_the_runtime_calls_is_told_from_others():
    seen = {}

    def note(where):
        seen[where] = _tf.python_call() is not None
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


def test_python_functions_are_found_and_registered_anew() -> None:
    def times(factor: float) -> Any:
        return lambda x: x * factor

    with tf.Graph().as_default() as graph:
        x = tf.constant(2.0)
        y = tf.py_function(times(3.0), [x], tf.float32)
        tf.gradients(y, x)
        z = tf.numpy_function(times(5.0), [x], tf.float32)
        assert _tf.python_function("pyfunc_of_nobody") is None
        for op in (y.op, z.op):
            like = _tf.python_function(op.get_attr("token").decode())
            assert isinstance(like, _tf.PythonFunction) and callable(like.body)
            token = _tf.register_python_function(times(7.0), like)
            again = _tf.python_function(token)
            assert again is not None and again.facts == like.facts
        assert like.facts == ()  # of the numpy_function
    with tf.compat.v1.Session(graph=graph) as session:
        assert session.run([y, z]) == [6.0, 10.0]
