# SPDX-License-Identifier: Apache-2.0
"""No tie remains in a step; gathered rows are gathered from the parts."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicator.graph.passes import ties
from tests import helpers
from tests.variables import parted

TABLE = np.random.RandomState(0).randn(9, 4).astype(np.float32)


def ops_of(step_of: Callable[[Any], Any], repl: Any) -> dict[str, list[tf.Operation]]:
    """Returns the ops that a step needs, by their types."""
    with repl.context():
        v = tf.Variable(TABLE)

    def step_fn() -> Any:
        return step_of(v)

    def run() -> Any:
        return tf.nest.flatten(repl.run(step_fn))

    function = tf.function(run, autograph=False)
    graph = function.get_concrete_function().graph
    by_type = collections.defaultdict(list)
    for op in helpers.ops_run([*graph.outputs, *graph.control_outputs]):
        by_type[op.type].append(op)
    return by_type


def gathers_of_the_value(v: Any) -> Any:
    value = tf.identity(tf.convert_to_tensor(v))
    return tf.gather(value, [1, 8]), tf.cast(tf.gather(value, [0]), tf.float64)


def test_a_join_of_which_rows_are_gathered_is_not_made() -> None:
    actual = ops_of(gathers_of_the_value, parted.replicas(2))
    assert not any(map(ties.is_tie, actual["IdentityN"]))
    assert not actual["ConcatV2"]
    assert not actual["ReadVariableOp"]
    assert len(actual["ResourceGather"]) == 2 * 2 * 3


def test_a_join_that_is_used_otherwise_too_is_made_and_gathered_from() -> None:
    def step(v: Any) -> Any:
        value = tf.convert_to_tensor(v)
        return tf.gather(value, [1, 8]), tf.reduce_sum(value)

    actual = ops_of(step, parted.replicas(2))
    assert not any(map(ties.is_tie, actual["IdentityN"]))
    assert actual["ConcatV2"]


@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_gathered_is_as_before(axis: int) -> None:
    repl = parted.replicas(2, parted.InParts(2, axis))
    with repl.context():
        v = tf.Variable(TABLE)
    two, one = repl.run(lambda: gathers_of_the_value(v))
    for own in two:
        np.testing.assert_array_equal(own, TABLE[[1, 8]])
    for own in one:
        np.testing.assert_array_equal(own, TABLE[[0]].astype(np.float64))


def test_layers_of_keras_ask_for_rows_only() -> None:
    repl = parted.replicas(2)
    with repl.context():
        layer = keras.layers.Embedding(9, 4)
        layer.build(None)
    actual = ops_of(lambda _: layer(tf.constant([[1, 8]])), repl)
    assert actual["ResourceGather"]
    assert not actual["ReadVariableOp"]


def test_a_loop_is_not_handed_the_whole_for_its_gradient() -> None:
    def step(v: Any) -> Any:
        def body(k: tf.Tensor, total: tf.Tensor) -> Any:
            return k + 1, total + tf.reduce_sum(tf.gather(v, [1, 8]) ** 2)

        with tf.GradientTape() as tape:
            loss = tf.while_loop(lambda k, _: k < 3, body, [0, 0.0])[1]
        return tape.gradient(loss, v)

    actual = ops_of(step, parted.replicas(2))
    assert actual["PlaceholderWithDefault"]  # one number, in the place of the whole
