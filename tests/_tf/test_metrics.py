# SPDX-License-Identifier: Apache-2.0
"""Methods of metrics of both kinds of Keras are found on the stack."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
import tf_keras

from replicator import _tf


@pytest.mark.parametrize("keras", [tf.keras, tf_keras])
def test_metric_call_is_the_innermost_update(keras: Any) -> None:
    seen = []

    def note() -> None:
        call = _tf.metric_call("update_state")
        seen.append(call and (type(call.metric).__name__, call.given))

    class Inner(keras.metrics.Mean):
        def update_state(self, values: Any, sample_weight: Any = None) -> None:
            note()

    class Outer(keras.metrics.Metric):
        def update_state(self, y: Any, y_pred: Any) -> None:
            note()
            Inner().update_state(y - y_pred)

        def result(self) -> float:
            return 0.0

    class NoMetric:
        def update_state(self, values: Any) -> None:
            note()

    Outer().update_state(5, y_pred=2)
    NoMetric().update_state(1)
    assert seen == [
        ("Outer", {"y": 5, "y_pred": 2}),
        ("Inner", {"values": 3, "sample_weight": None}),
        None,
    ]


@pytest.mark.parametrize("keras", [tf.keras, tf_keras])
def test_is_mean_knows_what_takes_the_means_of_values(keras: Any) -> None:
    metrics = keras.metrics
    assert _tf.is_mean(metrics.Mean()) and _tf.is_mean(metrics.MeanSquaredError())
    assert not _tf.is_mean(metrics.Sum()) and not _tf.is_mean(5)
