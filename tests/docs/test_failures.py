# SPDX-License-Identifier: Apache-2.0
"""Pages show what failed in a running step, and none of the places around it."""

from __future__ import annotations

import pytest
import tensorflow as tf

from docs.helpers import failures
from tests import helpers


def test_parts_of_an_assertion_are_lines() -> None:
    @tf.function
    def fail(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.Assert(x < 0, ["what is wrong:", "float32[2] at line 3"])
        return x

    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        fail(tf.constant(1))
    assert failures.said(raised.value) == "what is wrong:\nfloat32[2] at line 3"


def test_what_an_op_says() -> None:
    repl = helpers.make(2)
    lengths = tf.data.Dataset.from_tensor_slices([2, 3])
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        repl.run(lambda n: repl.all_reduce(tf.ones([n])), lengths)
    said = failures.said(raised.value)
    assert "[2] != input 1: [3]" in said and "\n" not in said
