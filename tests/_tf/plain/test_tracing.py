# SPDX-License-Identifier: Apache-2.0
"""Steps traced like any function have the same effects."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator._tf import ops
from replicator._tf.plain import tracing


def _never(*_: Any) -> list[tf.Operation]:
    raise AssertionError("TensorFlow orders the effects of a tf.function")


def test_trace_orders_and_runs_effects():
    variable = tf.Variable(0.0)
    seen: list[int] = []

    def build():
        variable.assign_add(2.0)
        tf.py_function(lambda: seen.append(1), [], [])
        variable.assign(variable * 3.0)
        return [tf.constant(5.0), variable.read_value(), None]

    function = tracing.trace(build, _never)
    five, value, nothing = function()
    assert (float(five), float(value), nothing) == (5.0, 6.0, None)
    assert (float(variable), seen) == (6.0, [1])


def test_trace_runs_nothing_that_was_abandoned():
    variable = tf.Variable(1.0)

    def build():
        ops.abandon([variable.assign(7.0, read_value=False)])
        return tf.constant(5.0)

    function = tracing.trace(build, _never)
    assert tracing.is_step(function.graph) and not tracing.is_step(tf.Graph())
    assert (float(function()), float(variable)) == (5.0, 1.0)


def test_trace_builds_once_and_raises_what_building_raised():
    built = []

    def build():
        built.append(1)
        return tf.constant(1.0)

    assert float(tracing.trace(build, _never)()) == 1.0 and built == [1]

    def fail():
        raise KeyError("told")

    with pytest.raises(KeyError, match="told"):
        tracing.trace(fail, _never)


def test_trace_says_whether_there_is_more_than_a_step():
    assert tracing.is_step(tracing.trace(lambda: tf.constant(1.0), _never).graph)
    more = tracing.trace(lambda: tf.constant(1.0), _never, only_step=False)
    assert not tracing.is_step(more.graph)
