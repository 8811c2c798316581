# SPDX-License-Identifier: Apache-2.0
"""Programs of graphs train as on one device, with all optimizers and strategies."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tests import sampling
from tests.autodist import helpers, programs
from tests.helpers import v1_control_flow

v1 = tf.compat.v1
BUILDERS = tuple(programs.BUILDERS)
QUICK = (
    (programs.regression, "momentum", "PartitionedPS", 2),
    (programs.embedding, "adam", "UnevenPartitionedPS", 3),
    (programs.embedding, "adagrad", "columns", 2),
    (programs.condition, "adagrad", "PartitionedPS", 3),
    (programs.condition, "sgd", "Parallax", 2),
    (programs.loop, "adam", "RandomAxisPartitionAR", 2),
    (programs.regression, "adam", "proxies", 3),
    (programs.cnn_on_an_iterator, "", "sharded", 3),
    (programs.placeholders, "", "mirrored", 3),
    (programs.dynamic_lstm, "", "PartitionedPS", 2),
    (programs.lm1b, "", "mirrored", 2),
    (programs.bert, "", "sharded", 2),
)
# In copies by proxies, control flow reads the owner's value.
ALL = [
    case
    for case in (
        *sampling.in_turn(
            programs.ANY, tuple(programs.OPTIMIZERS), BUILDERS, (1, 2, 3)
        ),
        *((one, "", "PartitionedPS", 2) for one in programs.OWN),
        *((one, "", "sharded", 3) for one in programs.OWN),
        *((one, "", "mirrored", 1) for one in programs.OWN),
    )
    if case not in QUICK
    and (case[2] != "proxies" or case[0] in (programs.regression, programs.embedding))
]


def _built(program: Any, optimizer: str) -> Any:
    if not optimizer:
        return program
    return lambda: program(programs.OPTIMIZERS[optimizer]())


@functools.cache
def _on_one_device(program: Any, optimizer: str) -> Any:
    sizes = programs.FEW if optimizer else programs.SIZES
    return helpers.run(_built(program, optimizer), None, sizes=sizes)


def _strategy(name: str) -> Any:
    return programs.BUILDERS.get(name, lambda: name)()


@pytest.mark.parametrize(
    "program, optimizer, name, replicas",
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL)],
)
def test_programs(program: Any, optimizer: str, name: str, replicas: int) -> None:
    expected = _on_one_device(program, optimizer)
    sizes = programs.FEW if optimizer else programs.SIZES
    with mock.patch.object(logging, "warning") as warning:
        built, plan = _built(program, optimizer), _strategy(name)
        actual = helpers.run(built, replicas, plan, sizes=sizes)
    assert not [call for call in warning.call_args_list if "strategy" in call.args[0]]
    helpers.assert_equal(actual, expected)


@pytest.mark.parametrize(
    "program, optimizer, name",
    [
        (programs.condition, "momentum", "PartitionedPS"),
        (programs.loop, "momentum", "PartitionedPS"),
        (programs.dynamic_lstm, "", "sharded"),
    ],
)
def test_control_flow_of_tensorflow_1(program: Any, optimizer: str, name: str) -> None:
    with v1_control_flow():
        run = functools.partial(helpers.run, _built(program, optimizer), sizes=(5, 4))
        helpers.assert_equal(run(2, _strategy(name)), run(None))


def _data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    np.random.seed(seed)
    x, noise = np.random.randn(1000), np.random.randn(1000)
    return x.astype(np.float32), (3 * x + 2 + noise).astype(np.float32)


# The values of AutoDist's own test, for the data of one worker, of two workers, and of
# two of which the first has twice as much.
_VALUES = (
    (1, [123], 4.957685286, 0.04175034879),
    (2, [123], 4.957685286, 0.04175034879),
    (2, [123, 456], 4.959388831, 0.041151709775),
    (3, [123, 123, 456], 4.958820982, 0.041351256),
    (2, [123, 123, 456], 4.958820982, 0.041351256),
)
_OF_NUMBERS = ("mirrored", "sharded", *(one for one in BUILDERS if one != "columns"))


@pytest.mark.battery(4)
@pytest.mark.parametrize(
    "values, name",
    [(_VALUES[k % 5], name) for k, name in enumerate(2 * _OF_NUMBERS)],
)
def test_the_values_of_autodists_regression(values: Any, name: str) -> None:
    replicas, seeds, w_then, b_then = values
    with helpers.scope(replicas, _strategy(name)) as autodist:
        x, y = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
        w, b = tf.Variable(5.0), tf.Variable(0.0)
        loss = tf.reduce_mean((w * x + b - y) ** 2)
        train = v1.train.GradientDescentOptimizer(0.01).minimize(loss)
        session = autodist.create_distributed_session()
        data = [np.concatenate(part) for part in zip(*map(_data, seeds), strict=True)]
        value, _ = session.run([loss, train], dict(zip((x, y), data, strict=True)))
        actual = session.run([w, b])
    np.testing.assert_allclose(actual, [w_then, b_then], rtol=0, atol=1e-6)
    if seeds == [123]:
        np.testing.assert_allclose(value, 9.401788026, rtol=1e-6)
