# SPDX-License-Identifier: Apache-2.0
"""Metrics in a step of one's own cover all examples, or are refused, or warned of."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from replicator import UnsupportedError
from tests import helpers

KINDS = {"keras": keras, "tf_keras": tf_keras}
X = np.array([3.0, 4.0, 5.0, 8.0, 1.0], np.float32)


def _make(package: str, aggregation: str = "sum") -> Any:
    """Returns a metric that is a maximum, which is no sum."""

    class Largest(KINDS[package].metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            if package == "keras":
                self.m = self.add_variable(
                    (), "zeros", aggregation=aggregation, name="m"
                )
            else:
                how = tf.VariableAggregation[aggregation.upper()]
                self.m = self.add_weight(
                    name="m", shape=(), initializer="zeros", aggregation=how
                )

        def update_state(self, x: Any) -> None:
            self.m.assign(tf.maximum(self.m, tf.reduce_max(x)))

        def result(self) -> Any:
            return self.m + 0.0

    return Largest()


@pytest.mark.parametrize("package", KINDS)
def test_a_metric_that_is_no_sum_is_refused(package: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        largest = _make(package)
    with pytest.raises(
        UnsupportedError,
        match="(?s)Largest.*replica 0.*test_metric_state.py:.*only_first_replica",
    ):
        repl.run(lambda x: largest.update_state(x), X, input_mode="global_batch")


@pytest.mark.parametrize("package", KINDS)
def test_it_is_right_if_replicas_update_it_alike(package: str) -> None:
    """This is what the refusal suggests."""
    repl = helpers.make(2)
    with repl.context():
        largest = _make(package, "only_first_replica")

    def step_fn(x: Any) -> Any:
        largest.update_state(repl.all_gather(x, axis=0))
        return largest.result()

    for value in repl.run(step_fn, X, input_mode="global_batch"):
        assert float(value) == 8.0
    assert float(largest.result()) == 8.0


@pytest.mark.parametrize("package", KINDS)
def test_results_in_a_step_cover_the_examples_of_all_replicas(package: str) -> None:
    """Of metrics updated several times in a step, in any way that Keras has."""
    metrics = KINDS[package].metrics
    makers: Any = (
        *(metrics.Mean, metrics.Sum, metrics.AUC, metrics.MeanSquaredError),
        *(lambda: metrics.MeanIoU(2), metrics.Precision, metrics.RootMeanSquaredError),
    )
    repl = helpers.make(2)
    with repl.context():
        replicated = [make() for make in makers]
    expected = [make() for make in makers]

    def update(some: Any, x: Any) -> None:
        labels = tf.cast(x > 3.5, tf.float32)[:, None]
        for _ in range(2):
            for metric in some[:2]:
                metric.update_state(x)
            for metric in some[2:]:
                rounded = tf.round if metric is some[4] else tf.identity
                metric.update_state(labels, rounded(x / 8.0)[:, None])

    def step_fn(x: Any) -> Any:
        with tf.GradientTape():
            update(replicated, x)
        return [metric.result() for metric in replicated]

    for _ in range(2):
        results = repl.run(step_fn, X, input_mode="global_batch")
        update(expected, tf.constant(X))
    for result, metric, other in zip(results, replicated, expected, strict=True):
        for value in (*result, metric.result()):
            np.testing.assert_allclose(value, other.result(), rtol=1e-5)


@pytest.mark.parametrize("package", KINDS)
def test_a_mean_of_means_of_uneven_shards_is_warned_of_once(
    package: str, caplog: pytest.LogCaptureFixture
) -> None:
    repl = helpers.make(2)
    make = KINDS[package].metrics.Mean
    with repl.context():
        equal, weighed, reduced, examples = (make(name=f"m{k}") for k in range(4))

    def step_fn(x: Any) -> None:
        own = tf.reduce_mean(x)
        equal.update_state(own)
        weighed.update_state(own, sample_weight=repl.weight)
        reduced.update_state(repl.all_reduce(own, "mean", weight=repl.weight))
        examples.update_state(x)

    for _ in range(2):
        repl.run(step_fn, X, input_mode="global_batch")
    texts = [record.getMessage() for record in caplog.records]
    (said,) = [text for text in texts if "weights replicas equally" in text]
    assert "metric m0 (Mean)" in said and "test_metric_state.py:" in said
    assert "Fix: pass sample_weight=repl.weight" in said
    for metric in (weighed, reduced, examples):
        np.testing.assert_allclose(float(metric.result()), X.mean(), rtol=1e-6)


def test_even_shards_are_not(caplog: pytest.LogCaptureFixture) -> None:
    repl = helpers.make(2)
    with repl.context():
        mean = keras.metrics.Mean()
    repl.run(
        lambda x: mean.update_state(tf.reduce_mean(x)), X[:4], input_mode="global_batch"
    )
    assert float(mean.result()) == X[:4].mean()
    assert "weights replicas equally" not in caplog.text


def test_results_of_metrics_of_v1_cover_the_examples_of_all_replicas() -> None:
    """They are computed in a merge_call."""
    with tf.Graph().as_default():
        repl = helpers.make(2)
        data = tf.data.Dataset.from_tensor_slices(np.tile(X, 2)).batch(5)

        def step_fn(x: Any) -> Any:
            values = []
            metrics = tf.compat.v1.metrics
            root = metrics.root_mean_squared_error(x, tf.zeros_like(x))
            for value, update in (metrics.mean(x), root):
                with tf.control_dependencies([update]):
                    values.append(tf.identity(value))
            return values

        fetches = repl.run(step_fn, data, input_mode="global_batch")
        with helpers.session() as session:
            session.run(tf.compat.v1.local_variables_initializer())
            session.run(tf.compat.v1.global_variables_initializer())
            repl.initialize(session)
            for _ in range(2):
                mean, root = session.run(fetches)
    np.testing.assert_allclose(list(mean), [X.mean()] * 2, rtol=1e-6)
    np.testing.assert_allclose(list(root), [np.sqrt((X**2).mean())] * 2, rtol=1e-6)
