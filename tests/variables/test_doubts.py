# SPDX-License-Identifier: Apache-2.0
"""What replicas write differently, though nobody asked for its mean, is warned of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from replicator import ContextError
from tests import helpers

AGGREGATION = tf.VariableAggregation
X = np.array([[1.0, 5.0], [2.0, 7.0], [3.0, 6.0], [8.0, 4.0]], np.float32)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "has no aggregation" in text]


def _run(step_fn: Callable[[Any], Any], repl: Any, steps: int = 2) -> None:
    for _ in range(steps):
        repl.run(step_fn, X, input_mode="global_batch")


class _Counting(keras.layers.Layer):
    def __init__(self, aggregation: str) -> None:
        super().__init__()
        self._how = aggregation

    def build(self, shape: Any) -> None:
        self.seen = self.add_weight(
            shape=[2], initializer="zeros", trainable=False, aggregation=self._how
        )

    def call(self, x: Any) -> Any:
        self.seen.assign_add(tf.reduce_sum(x, 0))
        return x


def test_a_mean_that_nobody_asked_for_is_warned_of_once_per_variable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repl = helpers.make(2)
    with repl.context():
        total = tf.Variable(tf.zeros([2]), name="total")
        largest = tf.Variable(0.0, name="largest")
        layer = _Counting("none")
        layer.build([None, 2])

    def step_fn(x: Any) -> None:
        total.assign_add(tf.reduce_sum(x, 0))

        @tf.function
        def within() -> None:
            largest.assign(tf.maximum(largest, tf.reduce_max(x)))

        within()
        layer(x)

    _run(step_fn, repl)
    repl.run(lambda x: step_fn(x), X[:2], input_mode="global_batch")  # built anew
    said = _said(caplog)
    assert len(said) == 3
    for text, name in zip(sorted(said), ("largest", "seen", "total"), strict=True):
        assert name in text or "variable" in text
        assert "their mean is assigned" in text and "test_doubts.py:" in text
        assert "Fix: " in text and "repl.all_reduce" in text
        assert "aggregation=tf.VariableAggregation.MEAN" in text
        assert "AutoDist.function" in text


LAYERS: dict[str, Callable[[], Any]] = {
    "keras": lambda: keras.layers.BatchNormalization(),
    "keras_renorm": lambda: keras.layers.BatchNormalization(renorm=True),
    "tf_keras": lambda: tf_keras.layers.BatchNormalization(),
    "sonnet": lambda: snt.BatchNorm(True, True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_moving_averages_of_libraries_are_not(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    repl = helpers.make(2)
    with repl.context():
        layer = LAYERS[name]()
        layer(X, is_training=True) if name == "sonnet" else layer.build([None, 2])
    flag = {"is_training" if name == "sonnet" else "training": True}
    _run(lambda x: layer(x, **flag), repl)
    assert not _said(caplog)


def test_metrics_of_sonnet_are(caplog: pytest.LogCaptureFixture) -> None:
    """They keep sums in variables that are not made for replicas."""
    repl = helpers.make(2)
    with repl.context():
        total = snt.Sum()
        total.initialize(tf.zeros([2]))
    _run(lambda x: total.update(tf.reduce_sum(x, 0)), repl)
    (text,) = _said(caplog)
    assert "test_doubts.py:" in text


def test_functions_of_whole_batches_are_not(caplog: pytest.LogCaptureFixture) -> None:
    """They are computed as on one device, as the warning says."""
    autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
    with autodist.scope():
        total = tf.Variable(tf.zeros([2]))

    @autodist.function
    def step(x: Any) -> Any:
        total.assign_add(tf.reduce_sum(x, 0))

    step(tf.constant(X))
    np.testing.assert_array_equal(total, X.sum(0))
    assert not _said(caplog)


def test_a_layers_sum_is_that_of_what_replicas_add(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Keras adds by assigning a sum, in which each replica has the value before."""
    repl = helpers.make(2)
    with repl.context():
        layer = _Counting("sum")
        layer.build([None, 2])
    _run(layer, repl, 3)
    np.testing.assert_array_equal(layer.seen, 3 * X.sum(0))
    assert not _said(caplog)


# --- Without a mean -------------------------------------------------------------------

COUNTERS: dict[str, Callable[[Any, Any], Any]] = {
    "size": lambda v, x: v.assign_add(tf.size(x)),
    "data": lambda v, x: v.assign_add(tf.math.count_nonzero(x > 4, dtype=tf.int32)),
    "choice": lambda v, x: tf.cond(
        tf.reduce_any(x > 4), lambda: v.assign_add(1), lambda: v.assign_add(2)
    ),
}


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("name", COUNTERS)
def test_integers_that_depend_on_examples_are_refused_whatever_the_batch(
    name: str, batch: int
) -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(0, name="seen")
    data = tf.data.Dataset.from_tensor_slices(X + 4).repeat().batch(batch)

    def step_fn(x: Any) -> None:
        COUNTERS[name](variable, x)

    with pytest.raises(
        ContextError, match="(?s)seen.*int32 has no mean.*test_doubts.py:.*all_reduce"
    ):
        repl.run(step_fn, data, input_mode="global_batch")


def test_integers_of_all_examples_are_assigned() -> None:
    repl = helpers.make(2)
    with repl.context():
        first, second = (
            tf.Variable(0, aggregation=a) for a in (AGGREGATION.NONE, AGGREGATION.SUM)
        )
    data = tf.data.Dataset.from_tensor_slices(X).batch(3).repeat()

    def step_fn(x: Any) -> None:
        first.assign_add(repl.all_reduce(tf.size(x)))
        second.assign_add(tf.size(x))

    for _ in range(2):
        repl.run(step_fn, data, input_mode="global_batch")
    assert (int(first), int(second)) == (X.size, X.size)


@pytest.mark.parametrize("dtype", [tf.int64, tf.float32])
def test_a_count_of_a_shards_examples_is_warned_of(
    caplog: pytest.LogCaptureFixture, dtype: tf.DType
) -> None:
    repl = helpers.make(2)
    with repl.context():
        count, right = (tf.Variable(tf.constant(0, dtype)) for _ in range(2))

    def step_fn(x: Any) -> None:
        count.assign_add(x.shape[0])
        right.assign_add(repl.all_reduce(tf.constant(x.shape[0], dtype), "sum"))

    _run(step_fn, repl)
    assert (int(count), int(right)) == (4, 8)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "each replica adds 2 to variable" in said and "test_doubts.py:" in said
    assert "of one replica only" in said and "Fix: " in said
    assert 'repl.all_reduce(x.shape[0], "sum")' in said


def _added(repl: Any, v: Any, x: Any) -> None:
    v.assign_add(tf.reduce_sum(x, 0))


def _counted(repl: Any, v: Any, x: Any) -> None:
    v.assign_add([float(x.shape[0])] * 2)


MEAN, SUM, FIRST = (
    {"aggregation": how}
    for how in (
        *(AGGREGATION.MEAN, AGGREGATION.SUM),
        AGGREGATION.ONLY_FIRST_REPLICA,
    )
)
# The facts of a variable, what is done to it, with how many examples, and its value.
QUIET: dict[str, tuple[dict[str, Any], Callable[..., Any], int, Any]] = {
    "a mean that is asked for": (MEAN, _added, 4, X.sum(0) / 2),
    "a sum that is asked for": (SUM, _added, 4, X.sum(0)),
    "a sum by communication": (
        *({}, lambda repl, v, x: v.assign_add(repl.all_reduce(tf.reduce_sum(x, 0)))),
        *(4, X.sum(0)),
    ),
    "a maximum by communication": (
        {},
        lambda repl, v, x: v.assign(
            0.5 * v + tf.maximum(v, repl.all_reduce(tf.reduce_max(x, 0), "max"))
        ),
        *(4, X.max(0)),
    ),
    "steps": ({}, _counted, 2, 1.0),
    "another number": ({}, lambda repl, v, x: v.assign_add([3.0, 3.0]), 4, 3.0),
    "a sum of counts": (SUM, _counted, 4, 4.0),
    "counts said to be equal": (FIRST, _counted, 4, 2.0),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_right_is_done_without_a_word(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    facts, write, rows, expected = QUIET[name]
    repl = helpers.make(2)
    with repl.context():
        v = tf.Variable(tf.zeros([2]), **facts)

    def step_fn(x: Any) -> None:
        write(repl, v, x)

    repl.run(step_fn, X[:rows], input_mode="global_batch")
    np.testing.assert_array_equal(v, tf.broadcast_to(expected, [2]))
    assert not caplog.records
