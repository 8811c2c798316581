# SPDX-License-Identifier: Apache-2.0
"""What would only be read by ops that are removed."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator.graph.lowering import unread


def _names(removed: tf.Operation) -> set[str]:
    return {op.name for op in unread.ops([removed])}


@pytest.mark.parametrize("reader", ["none", "another op", "control", "effect"])
def test_only_what_nothing_else_reads(reader: str) -> None:
    with tf.Graph().as_default():
        x = tf.constant(1.0, name="x")
        shared = tf.add(x, 1.0, name="shared")
        half = tf.multiply(shared, 0.5, name="half")
        if reader == "effect":
            half = tf.numpy_function(np.negative, [shared], tf.float32)
        removed = tf.negative(half, name="removed").op
        tf.negative(shared, name="live")
        if reader == "another op":
            tf.negative(half)
        if reader == "control":
            with tf.control_dependencies([half]):
                tf.no_op()
        expected = {"removed"}
        if reader == "none":
            expected |= {"half", "half/y"}
        assert _names(removed) == expected


def test_two_readers_that_are_both_removed() -> None:
    """Whichever is visited first."""
    with tf.Graph().as_default():
        x = tf.constant(1.0, name="x")
        left, right = (tf.negative(x, name=side) for side in ("left", "right"))
        removed = tf.add(left, right, name="removed").op
        assert _names(removed) == {"removed", "left", "right", "x"}
