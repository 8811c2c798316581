# SPDX-License-Identifier: Apache-2.0
"""The law of the rules of random numbers.

Stateless ones are exactly those of one device. Others are of the same law: no replica
draws those of another, and what is of replicated shape is the same on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.forms import engine
from tests.forms.laws import WHOLE, Inputs, Sample

SEED = [3, 7]
FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
INTEGERS = (tf.int32, tf.int64)
ANY = (*INTEGERS, tf.uint32, tf.uint64)


def shape_of(v: Inputs) -> tf.Tensor:
    """Returns a shape of which rows begin at odd numbers."""
    return tf.shape(v.x)


def _sample(type_: str, function: Any, dtype: Any, *limits: Any) -> Sample:
    def make(v: Inputs) -> tf.Tensor:
        ends = [tf.constant(one, dtype) for one in limits]
        return function(shape_of(v), SEED, *ends, dtype=dtype)

    return Sample(type_, make, grads=False)


UNIFORM, NORMAL = tf.random.stateless_uniform, tf.random.stateless_normal


def full(shape: tf.Tensor, seed: Any, dtype: Any) -> tf.Tensor:
    return UNIFORM(shape, seed, None, None, dtype)


STATELESS = [
    *(_sample("StatelessRandomUniformV2", UNIFORM, dtype) for dtype in FLOATS),
    *(_sample("StatelessRandomNormalV2", NORMAL, dtype) for dtype in FLOATS),
    *(_sample("StatelessRandomUniformIntV2", UNIFORM, t, 3, 2**30) for t in INTEGERS),
    *(_sample("StatelessRandomUniformFullIntV2", full, dtype) for dtype in ANY),
    Sample(
        "StatelessRandomUniformV2",
        lambda v: UNIFORM([tf.shape(v.x)[0]], SEED),
        grads=False,
    ),
]
OTHERS = [
    Sample("Mul", lambda v: tf.nn.experimental.stateless_dropout(v.x, 0.5, SEED)),
    Sample("Mul", lambda v: v.x * UNIFORM([3], SEED)),
    Sample("Mul", lambda v: tf.transpose(v.x) * UNIFORM([3, tf.shape(v.x)[0]], SEED)),
    Sample(
        "Mul", lambda v: v.x * tf.random.stateless_truncated_normal(shape_of(v), SEED)
    ),
    Sample("Mul", lambda v: v.x * tf.random.stateless_gamma(shape_of(v), SEED, 2.0)),
    Sample("Cat", lambda v: tf.random.stateless_categorical(v.x, 2, SEED), WHOLE),
    Sample(
        "Shuffle", lambda v: tf.random.experimental.stateless_shuffle(v.x, SEED), WHOLE
    ),
]


DRAWN: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "RandomStandardNormal": lambda x: tf.random.normal(tf.shape(x)),
    "RandomUniform": lambda x: tf.random.uniform(tf.shape(x)),
    "RandomUniformInt": lambda x: tf.random.uniform(tf.shape(x), 0, 2**30, tf.int32),
    "TruncatedNormal": lambda x: tf.random.truncated_normal(tf.shape(x)),
}
SHARED: dict[str, Callable[[], tf.Tensor]] = {
    "normal": lambda: tf.random.normal([3]),
    "uniform": lambda: tf.random.uniform([3]),
    "shuffle": lambda: tf.random.shuffle(tf.range(3.0)),
    "gamma": lambda: tf.random.gamma([3], 2.0),
    "categorical": lambda: tf.cast(
        tf.random.categorical(tf.zeros([3, 99]), 1), tf.float32
    )[:, 0],
}


def _run(function: Any, count: int) -> Any:
    repl = replicator.Replicator(["cpu:0", "cpu:1", "cpu:2"])
    spec = tf.TensorSpec([None, 3], tf.float32)
    run = engine.WholeBatchFunction(function, repl, [spec])
    return run(np.ones([count, 3], np.float32)), run


@pytest.mark.parametrize("seed", [None, 5])
def test_each_replica_draws_its_own(seed: int | None) -> None:
    def step(x: tf.Tensor) -> Any:
        return {name: draw(x) for name, draw in DRAWN.items()}

    tf.random.set_seed(seed or 1)
    drawn, run = _run(step, 8)
    for name, numbers in drawn.items():
        assert numbers.shape == (8, 3), name
        assert len(np.unique(numbers)) > 20, (name, numbers)
    again = run(np.ones([8, 3], np.float32))
    assert all(np.any(again[name] != drawn[name]) for name in drawn)
    planned = {op.type: plan for op, plan in run.program((0,)).plan.plans.items()}
    assert all(name in planned for name in DRAWN)


def test_what_has_no_rows_is_drawn_once() -> None:
    def step(x: tf.Tensor) -> Any:
        return {name: x * draw() for name, draw in SHARED.items()}

    drawn, _ = _run(step, 6)
    for name, numbers in drawn.items():
        assert len(np.unique(numbers, axis=0)) == 1, (name, numbers)


def test_the_dropout_of_keras_drops_others_on_each_replica() -> None:
    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    with repl.context():
        layer = tf.keras.layers.Dropout(0.5, seed=1)
    plain = tf.keras.layers.Dropout(0.5, seed=1)
    spec = tf.TensorSpec([None, 8], tf.float32)
    run = engine.WholeBatchFunction(lambda x: layer(x, training=True), repl, [spec])
    x = np.ones([6, 8], np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(run(x), plain(x, training=True))
