# SPDX-License-Identifier: Apache-2.0
"""The law of the rules of ops that move elements to other axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator.forms import engine
from tests.forms.laws import SUM, WHOLE, Inputs, Sample, op

raw = tf.raw_ops
ROW = np.array([0.5, -1.5, 2.0], np.float32)


def total(x: tf.Tensor) -> tf.Tensor:
    """Returns a sum over the batch, which replicas have summands of."""
    return raw.Sum(input=x, axis=[0])


def rows(x: tf.Tensor) -> tf.Tensor:
    """Returns the number of rows."""
    return tf.shape(x)[0]


def as_many(x: tf.Tensor) -> tf.Tensor:
    """Returns the number of rows, of which is not known that it is."""
    return tf.size(tf.unique(tf.range(rows(x))).y)


def unknown(size: int) -> tf.Tensor:
    """Returns a size that is known when it runs."""
    return raw.PlaceholderWithDefault(input=size, shape=[])


def reshape(x: Any, *shape: Any) -> tf.Tensor:
    return raw.Reshape(tensor=x, shape=shape)


def transpose(x: Any, *order: int) -> tf.Tensor:
    return raw.Transpose(x=x, perm=order)


def blocks(v: Inputs) -> tf.Tensor:
    """Returns two batches, one behind the other."""
    return tf.concat([v.x, v.y], 0)


SAMPLES = [
    Sample("Reshape", lambda v: reshape(v.x, -1, 3, 1)),
    Sample("Reshape", lambda v: reshape(v.x, rows(v.x), 1, 3)),
    Sample("Reshape", lambda v: reshape(v("x", 2, 4), rows(v("x", 2, 4)), -1)),
    Sample("Reshape", lambda v: reshape(v("x", 2, 4), -1, 4)),
    Sample("Reshape", lambda v: reshape(v("x", 2, 4), rows(v("x", 2, 4)) * 2, 4)),
    Sample("Reshape", lambda v: reshape(v.x, -1)),
    Sample("Reshape", lambda v: reshape(reshape(v.x, -1), -1, 3)),
    Sample("Reshape", lambda v: reshape(v.x, 1, -1, 3)),
    Sample("Reshape", lambda v: reshape(transpose(v.x, 1, 0), -1)),
    Sample("Reshape", lambda v: reshape(transpose(v("x", 4, 2), 1, 0, 2), -1, 2)),
    Sample("Reshape", lambda v: reshape(blocks(v), 2, -1, 3)),
    Sample("Reshape", lambda v: reshape(total(v.x), 3, 1), SUM),
    Sample("Transpose", lambda v: transpose(v.x, 1, 0)),
    Sample("Transpose", lambda v: transpose(v("x", 2, 4), 2, 0, 1)),
    Sample("Transpose", lambda v: transpose(total(v("x", 2, 4)), 1, 0), SUM),
    Sample("ExpandDims", lambda v: raw.ExpandDims(input=v.x, axis=0)),
    Sample("ExpandDims", lambda v: raw.ExpandDims(input=v.x, axis=1)),
    Sample("ExpandDims", lambda v: raw.ExpandDims(input=v.x, axis=-1)),
    Sample("ExpandDims", lambda v: raw.ExpandDims(input=total(v.x), axis=0), SUM),
    Sample("Squeeze", lambda v: raw.Squeeze(input=v("x", 1, 3), axis=[1])),
    Sample("Squeeze", lambda v: raw.Squeeze(input=v.x[None], axis=[0])),
    Sample("Squeeze", lambda v: raw.Squeeze(input=total(v("x", 1, 3))), SUM),
    Sample("Tile", lambda v: raw.Tile(input=v.x, multiples=[1, 2])),
    Sample("Tile", lambda v: raw.Tile(input=v.x, multiples=[2, 1])),
    Sample("Tile", lambda v: raw.Tile(input=total(v.x), multiples=[2]), SUM),
    Sample("Fill", lambda v: raw.Fill(dims=[rows(v.x), 2], value=3.0)),
    Sample("Fill", lambda v: raw.Fill(dims=[2, rows(v.x) * 2], value=3.0)),
    op("BroadcastTo", input=lambda v: v.x[:, None], shape=[lambda v: rows(v.x), 4, 3]),
    Sample("Tile", lambda v: raw.Tile(input=ROW[None], multiples=[rows(v.x), 2])),
    Sample("BroadcastTo", lambda v: raw.BroadcastTo(input=ROW, shape=tf.shape(v.x))),
    Sample("BroadcastTo", lambda v: tf.broadcast_to(v("x", 1), [2, rows(v.x), 3])),
    Sample("Range", lambda v: raw.Range(start=0, limit=rows(v.x), delta=1)),
]
# Ops among others, and ops that are computed as a whole.
OTHERS = [
    Sample("BroadcastTo", lambda v: tf.broadcast_to(v("x", 1)[::-1], tf.shape(v.x))),
    Sample("Mul", lambda v: v.x * v("y", 1)),  # in the gradient of broadcasting
    Sample("Mul", lambda v: tf.tile(ROW[None] * 1.0, [rows(v.x), 2]) * v("y", 6)),
    Sample("Mul", lambda v: tf.range(rows(v.x))[:, None] * tf.ones([1, 3], tf.int32)),
    Sample("Reshape", lambda v: reshape(transpose(v.x, 1, 0), -1, 3), WHOLE),
    Sample("Reshape", lambda v: reshape(v("x", 2), as_many(v.x), -1), WHOLE),
    Sample("Reshape", lambda v: reshape(v.x, rows(v.x) * unknown(3), -1)),
    Sample(
        "Reshape", lambda v: reshape(reshape(v.x, -1, unknown(1)), rows(v.x) * 3, -1)
    ),
    Sample("Reshape", lambda v: reshape(transpose(v.x, 1, 0), -1, as_many(v.x)), WHOLE),
    Sample("Reshape", lambda v: reshape(v.x, -1, as_many(v.x) * 3), WHOLE),
    Sample(
        "Sum",
        lambda v: total(
            reshape(
                transpose(v("x", 2, 12), 1, 0, 2), unknown(8), rows(v.x) * unknown(3)
            )
        ),
    ),
    Sample(
        "Sum",
        lambda v: total(
            reshape(transpose(v("x", 3, 4), 1, 0, 2), rows(v.x) * unknown(1), 12)
        ),
    ),
    Sample("Squeeze", lambda v: raw.Squeeze(input=v("x", 1, 3)), WHOLE),
    Sample("Fill", lambda v: raw.Fill(dims=[rows(v.x) + 1], value=3.0), WHOLE),
    Sample("Range", lambda v: raw.Range(start=1, limit=rows(v.x), delta=1), WHOLE),
    Sample("Tile", lambda v: raw.Tile(input=v.x, multiples=[rows(v.x), 1]), WHOLE),
]


def test_axes_of_unknown_length_are_gathered_where_others_may_broadcast() -> None:
    """Two rows of the batch are one, and an axis of unknown length has length 1."""

    def compute(x: tf.Tensor) -> tf.Tensor:
        pairs = tf.reshape(x, [-1, unknown(6)])
        mean = tf.reshape(tf.reduce_mean(x), [unknown(1), 1])
        return pairs + tf.reverse(pairs, [0]) * mean

    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    run = engine.WholeBatchFunction(compute, repl, [tf.TensorSpec([None, None])])
    x = tf.reshape(tf.range(12.0), [4, 3])
    np.testing.assert_allclose(run(x), compute(x))
