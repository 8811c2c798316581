# SPDX-License-Identifier: Apache-2.0
"""tf.train.ExponentialMovingAverage in a step is that of one device, without a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers

BATCHES = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0], [7.0, 7.0, 1.0]], np.float32)
DECAY = 0.75


def _data() -> tf.data.Dataset:
    """Returns batches of three examples, which two replicas share unevenly."""
    return tf.data.Dataset.from_tensor_slices(BATCHES.ravel()).batch(3)


def test_of_a_variable_it_is_that_of_one_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(1.0)
        average = tf.train.ExponentialMovingAverage(DECAY)
        average.apply([variable])

    def step_fn(x: Any) -> None:
        variable.assign(repl.all_reduce(tf.reduce_mean(x), "mean", weight=repl.weight))
        average.apply([variable])

    expected = 1.0
    for batch in BATCHES:
        repl.run(step_fn, _data, input_mode="global_batch")
        expected = DECAY * expected + (1 - DECAY) * batch.mean()
    np.testing.assert_allclose(average.average(variable), expected, rtol=1e-6)
    assert not caplog.text


def test_of_a_tensor_it_is_that_of_all_examples(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It begins with zero, which is taken into account if zero_debias is set."""
    expected, biased = [], 0.0
    for k, batch in enumerate(BATCHES, 1):
        biased += (1 - DECAY) * (batch.mean() - biased)
        expected.append(biased / (1 - DECAY**k))
    with tf.Graph().as_default():
        repl = helpers.make(2)
        average = tf.train.ExponentialMovingAverage(DECAY, zero_debias=True)

        def step_fn(x: Any) -> Any:
            mean = tf.reduce_mean(x)
            with tf.control_dependencies([average.apply([mean])]):
                return average.average(mean).read_value()

        fetches = repl.run(step_fn, _data, input_mode="global_batch")
        with helpers.session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            repl.initialize(session)
            results = [session.run(fetches) for _ in BATCHES]
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(list(result), [value, value], rtol=1e-6)
    assert not caplog.text
