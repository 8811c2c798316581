# SPDX-License-Identifier: Apache-2.0
"""A value's relation to the examples follows from the ops that compute it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from replicator.autodist.kinds import Kind
from replicator.autodist.program import Program
from replicator.autodist.values import Values
from tests.autodist.helpers import known
from tests.autodist.test_session import scope
from tests.helpers import v1_control_flow

v1 = tf.compat.v1

Make = Callable[[tf.Tensor], tf.Tensor]


def _count(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.shape(x)[0], tf.float32)


def _turns(x: tf.Tensor, start: tf.Tensor, go_on: Make, turn: Make) -> tf.Tensor:
    return tf.while_loop(go_on, lambda t: [turn(t)], [start])[0]


VALUES: dict[str, tuple[Make, Kind, float]] = {
    "rows": (lambda x: 2 * x, Kind.ROWS, 0),
    "mean": (lambda x: tf.reduce_mean(x), Kind.MEAN, 0),
    "sum": (lambda x: -3 * tf.reduce_sum(x, 0), Kind.MEAN, 1),
    "maximum": (lambda x: tf.reduce_max(x) + 1, Kind.MAX, 0),
    "minimum": (lambda x: -tf.reduce_max(x), Kind.MIN, 0),
    "count": (_count, Kind.SAME, 1),
    "size": (lambda x: tf.size(x), Kind.SAME, 1),
    "columns": (lambda x: tf.shape(x)[1] + 1, Kind.SAME, 0),
    "shape": (lambda x: tf.shape(x), Kind.SIZES, 0),
    "sum over count": (lambda x: tf.reduce_sum(x) / _count(x), Kind.MEAN, 0),
    "mean times count": (lambda x: tf.reduce_mean(x) * _count(x), Kind.MEAN, 1),
    "root of count": (lambda x: tf.sqrt(_count(x)), Kind.SAME, 0.5),
    "ratio": (lambda x: tf.reduce_sum(x) / tf.reduce_sum(x * x), Kind.MEAN, 0),
    "mean of some": (
        lambda x: tf.reduce_mean(tf.boolean_mask(x, x[:, 0] > 0)),
        *(Kind.RATIO, 1),
    ),
    "root of a mean": (lambda x: tf.sqrt(tf.reduce_mean(x)), Kind.STATISTIC, 0),
    "mean and sum": (
        lambda x: tf.reduce_mean(x) + tf.reduce_sum(x),
        *(Kind.MIXED, 0),
    ),
    "mean and zeros": (
        lambda x: tf.reduce_sum(x) + tf.zeros([]),
        *(Kind.MEAN, 1),
    ),
    "two means": (
        lambda x: tf.stack([tf.reduce_mean(x), tf.reduce_mean(x * x)]),
        *(Kind.MEAN, 0),
    ),
    "rounded": (
        lambda x: tf.reduce_mean(tf.cast(x, tf.int32)),
        *(Kind.STATISTIC, 0),
    ),
    "drawn": (lambda x: tf.random.uniform([2]), Kind.DRAWN, 0),
    "noise": (lambda x: tf.reduce_mean(x) + tf.random.normal([]), Kind.MEAN, 0),
    "noisy count": (lambda x: _count(x) + tf.random.normal([]), Kind.UNKNOWN, 0),
    "noisy sum": (lambda x: tf.reduce_sum(x) + tf.random.normal([]), Kind.MIXED, 0),
    "constant": (lambda x: tf.ones([3]), Kind.SAME, 0),
    "first row": (lambda x: x[0], Kind.UNKNOWN, 0),
    "rounded between bounds": (
        lambda x: tf.quantization.quantize_and_dequantize_v2(
            *(x, -1.0, 1.0), range_given=True
        ),
        *(Kind.ROWS, 0),
    ),
    "rounded between what there is": (
        lambda x: tf.quantization.quantize_and_dequantize_v2(
            *(x, -1.0, 1.0), range_given=False
        ),
        *(Kind.UNKNOWN, 0),
    ),
    "any of them": (lambda x: tf.reduce_max(x) > 3, Kind.MAX, 0),
    "a function": (
        lambda x: tf.function(lambda y: tf.reduce_sum(y))(x),
        *(Kind.MEAN, 1),
    ),
    "a branch": (
        lambda x: tf.cond(
            tf.shape(x)[1] > 2, lambda: tf.reduce_mean(x), lambda: tf.zeros([])
        ),
        *(Kind.MEAN, 0),
    ),
    "branches of two kinds": (
        lambda x: tf.cond(
            tf.shape(x)[1] > 2, lambda: tf.reduce_mean(x), lambda: tf.reduce_max(x)
        ),
        *(Kind.UNKNOWN, 0),
    ),
    "a branch by examples": (
        lambda x: tf.cond(
            tf.reduce_sum(x) > 2, lambda: tf.reduce_mean(x), lambda: tf.zeros([])
        ),
        *(Kind.UNKNOWN, 0),
    ),
    "turns that add": (
        lambda x: _turns(
            x, tf.zeros([]), lambda t: True, lambda t: t + tf.reduce_mean(x)
        ),
        *(Kind.MEAN, 0),
    ),
    "turns that multiply": (
        lambda x: _turns(
            x, tf.ones([]), lambda t: True, lambda t: t * tf.reduce_mean(x)
        ),
        *(Kind.UNKNOWN, 0),
    ),
    "turns of rows": (
        lambda x: _turns(x, x, lambda t: True, lambda t: tf.tanh(t)),
        *(Kind.ROWS, 0),
    ),
    "turns that the examples end": (
        lambda x: _turns(x, x, lambda t: tf.reduce_sum(t) < 9, lambda t: t * 2),
        *(Kind.UNKNOWN, 0),
    ),
}
FLOW = [name for name in VALUES if name.startswith(("a branch", "branch", "turns"))]


@pytest.mark.parametrize("name", VALUES)
def test_values_are_told_by_what_computes_them(name: str) -> None:
    make, kind, power = VALUES[name]
    _, value = known(make)
    assert (value.kind, value.power) == (kind, power)


@pytest.mark.parametrize("name", FLOW)
def test_so_they_are_in_the_control_flow_of_tensorflow_1(name: str) -> None:
    make, kind, power = VALUES[name]
    with v1_control_flow():
        _, value = known(make)
    assert (value.kind, value.power) == (kind, power)


def test_what_sums_are_divided_by_and_rows_less_are_of_the_whole_batch() -> None:
    tensor, value = known(lambda x: tf.reduce_sum(x) / tf.reduce_sum(x * x))
    (whole,) = value.wholes
    assert whole.tensor is tensor.op.inputs[1] and whole.power == 1
    results = []

    def make(x: tf.Tensor) -> tf.Tensor:
        results.append(x - tf.reduce_mean(x, 0))
        return tf.reduce_sum(2 * results[0])

    _, value = known(make)
    (whole,) = value.wholes
    assert whole.tensor is results[0].op.inputs[1] and whole.power == 0
    assert value.mixed is None and value.kind is Kind.MEAN


def test_statistics_of_what_is_trained_are_named_wherever_they_go() -> None:
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None, 3])
        trained = x * tf.Variable(2.0)
        rows = trained - tf.reduce_mean(trained, 0)
        total = tf.reduce_sum(2 * rows)
        program = Program(v1.get_default_graph(), autodist._scope.variables)
        value = Values(program.flow).of(total)
    assert not value.wholes
    assert value.mixed is rows.op and value.kind is Kind.MEAN
