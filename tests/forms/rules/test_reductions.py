# SPDX-License-Identifier: Apache-2.0
"""Rules of reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.forms import engine
from tests.forms.laws import SUM, WHOLE, Inputs, Sample

raw = tf.raw_ops


def reduced(
    name: str, key: str, axes: list[int], form: str, keep: bool = False
) -> Sample:
    """Returns a sample of an op that reduces axes of a [rows, 2, 3] tensor."""

    def make(v: Inputs) -> tf.Tensor:
        return getattr(raw, name)(input=v(key, 2, 3), axis=axes, keep_dims=keep)

    return Sample(name, make, form)


def slope(product: Any, other: Any) -> tf.Tensor:
    """Returns the gradient of a product by what has one row for all."""
    other = tf.constant(other, tf.float32)
    (made,) = tf.gradients(tf.sin(product(other)), other)
    return made


SAMPLES = [
    *[reduced(name, "x", [0], SUM) for name in ("Sum", "Mean", "Max", "Min")],
    *[reduced(name, "x", [0, 2], SUM) for name in ("Sum", "Mean")],
    *[reduced(name, "x", [-1, 0, 1], SUM, True) for name in ("Sum", "Mean", "Max")],
    *[reduced(name, "x", [1], "sharded") for name in ("Sum", "Mean", "Max", "Prod")],
    *[reduced(name, "b", [0, 1], SUM) for name in ("Any", "All")],
    *[reduced(name, "b", [2], "sharded", True) for name in ("Any", "All")],
    reduced("Sum", "i", [0], SUM),
    reduced("Sum", "z", [0], SUM),
    reduced("Mean", "z", [0, 1], SUM),
    reduced("EuclideanNorm", "x", [1], "sharded"),
    reduced("Mean", "z", [0], SUM),
    Sample("Sum", lambda v: raw.Sum(input=raw.Sum(input=v.x, axis=[0]), axis=[0]), SUM),
    Sample(
        "Max",
        lambda v: raw.Max(input=raw.Max(input=v.x, axis=[0]), axis=[0]),
        SUM,
        grads=False,
    ),
    Sample(
        "Max", lambda v: raw.Max(input=raw.Sum(input=v.x, axis=[0]), axis=[0]), WHOLE
    ),
    # An axis that is no longer the first.
    Sample(
        "Sum",
        lambda v: raw.Sum(input=tf.transpose(v("x", 2, 3), [1, 0, 2]), axis=[0]),
    ),
    Sample(
        "Mean",
        lambda v: raw.Mean(input=tf.transpose(v("x", 2, 3), [1, 0, 2]), axis=[0, 1]),
        SUM,
    ),
    # Gradients of broadcasting sum what was repeated.
    Sample("Sum", lambda v: tf.reduce_sum((v("x", 2, 3) * v("y", 1, 3)) ** 2, 2)),
    Sample("Sum", lambda v: tf.reduce_sum(v("x", 2, 3) * v("y", 2, 1), [0, 1]), SUM),
    Sample("Sum", lambda v: tf.reduce_sum(v.x * tf.reduce_mean(v.y, 0), 1)),
    # Of one row, nothing is summed on one device, but nothing is what a replica has.
    Sample("Sum", lambda v: slope(lambda a: v.x * a, [[1, 2, 3]]), SUM),
    Sample("Sum", lambda v: slope(lambda a: v("x", 1, 2) @ a, np.ones([1, 2, 3])), SUM),
]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_a_mean_of_half_precision_overflows_no_more_than_on_one_device(
    dtype: tf.DType,
) -> None:
    """Neither the sum nor the number of elements has to fit the type."""
    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    spec = tf.TensorSpec([None, 400], dtype)
    run = engine.WholeBatchFunction(lambda x: tf.reduce_mean(x), repl, [spec])
    mean = run(tf.fill([201, 400], tf.constant(300, dtype)))
    assert mean.dtype == dtype
    np.testing.assert_allclose(float(mean), 300, rtol=1e-2)
