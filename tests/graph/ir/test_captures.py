# SPDX-License-Identifier: Apache-2.0
"""The meaning of captured tensors."""

from __future__ import annotations

import tensorflow as tf

from replicator.graph.ir.captures import Captures


def test_a_tensor_captured_twice_over_is_the_outermost_one() -> None:
    results = []

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        y = x + 1
        captures = Captures()

        def branch() -> tf.Tensor:
            def inner() -> tf.Tensor:
                first = tf.identity(y)
                results.append(captures.outermost(first.op.inputs[0]) is y)
                # Captured only after its graph was inspected.
                second = tf.identity(x)
                results.append(captures.outermost(second.op.inputs[0]) is x)
                return first + second

            return tf.cond(x > 1, inner, lambda: y)

        return tf.cond(x > 0, branch, lambda: y)

    outer.get_concrete_function(tf.TensorSpec([], tf.float32))
    assert results and all(results)


def test_what_is_not_captured_is_itself() -> None:
    x = tf.constant(1.0)
    assert Captures().outermost(x) is x
    with tf.Graph().as_default():
        y = tf.constant(1.0)
        assert Captures().outermost(y) is y

    @tf.function
    def function(z: tf.Tensor) -> tf.Tensor:
        assert Captures().outermost(z) is z
        return z

    function.get_concrete_function(tf.TensorSpec([], tf.float32))
