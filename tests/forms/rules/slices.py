# SPDX-License-Identifier: Apache-2.0
"""The law of the rules of ops that take parts of axes, or put parts together."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.forms.laws import SUM, WHOLE, Inputs, Sample, op, v

raw = tf.raw_ops
ROW = np.array([0.5, -1.5, 2.0], np.float32)
PADS = [[0, 0], [1, 2]]


def total(x: tf.Tensor) -> tf.Tensor:
    """Returns a sum over the batch, which replicas have summands of."""
    return raw.Sum(input=x, axis=[0])


def rows(x: tf.Tensor) -> tf.Tensor:
    """Returns the number of rows."""
    return tf.shape(x)[0]


def pack(*values: Any, axis: int = 0) -> tf.Tensor:
    return raw.Pack(values=values, axis=axis)


def concat(*values: Any, axis: int = 0) -> tf.Tensor:
    return raw.ConcatV2(values=values, axis=axis)


def split(value: Any, count: int, axis: int) -> Any:
    return raw.Split(axis=axis, value=value, num_split=count)


def split_v(value: Any, sizes: Any, axis: int) -> Any:
    count = len(sizes)
    return raw.SplitV(value=value, size_splits=sizes, axis=axis, num_split=count)


def take(value: Any, begin: Any, size: Any) -> tf.Tensor:
    return raw.Slice(input=value, begin=begin, size=size)


def blocks(v: Inputs) -> tf.Tensor:
    """Returns two batches, one behind the other."""
    return tf.concat([v.x, v.y], 0)


def _put_back(v: Inputs, **masks: int) -> tf.Tensor:
    """Returns the gradient of v.x[:, 1:]."""
    return raw.StridedSliceGrad(
        shape=[rows(v.x), 5],
        begin=[0, 1],
        end=[0, 4],
        strides=[1, 1],
        dy=v.x,
        begin_mask=1,
        end_mask=1,
    )


SAMPLES = [
    Sample("Pack", lambda v: pack(v.x, v.y)),
    Sample("Pack", lambda v: pack(v.x, v.y, axis=1)),
    Sample("Pack", lambda v: pack(v.x, v.y, axis=-1)),
    Sample("Pack", lambda v: pack(total(v.x), ROW), SUM),
    Sample("Unpack", lambda v: raw.Unpack(value=v.x, num=3, axis=1)),
    Sample("Unpack", lambda v: raw.Unpack(value=v("x", 2, 3), num=2, axis=-2)),
    Sample("Unpack", lambda v: raw.Unpack(value=pack(v.x, v.y), num=2)),
    Sample("Unpack", lambda v: raw.Unpack(value=total(v.x), num=3), SUM),
    Sample("ConcatV2", lambda v: concat(v.x, v.y)),
    Sample("ConcatV2", lambda v: concat(blocks(v), blocks(v))),
    Sample("ConcatV2", lambda v: concat(v.x, v("y", 2), axis=1)),
    Sample("ConcatV2", lambda v: concat(v.x, v("y", 2), axis=-1)),
    Sample("ConcatV2", lambda v: concat(total(v.x), ROW), SUM),
    Sample("Split", lambda v: split(v.x, 3, 1)),
    Sample("Split", lambda v: split(blocks(v), 2, 0)),
    Sample("Split", lambda v: split(total(v("x", 4)), 2, 0), SUM),
    Sample("SplitV", lambda v: split_v(v.x, [1, 2], 1)),
    Sample("SplitV", lambda v: split_v(v.x, [2, -1], -1)),
    Sample("SplitV", lambda v: split_v(total(v.x), [1, 2], 0), SUM),
    Sample("Slice", lambda v: take(v.x, [0, 1], [-1, 2])),
    Sample("Slice", lambda v: take(v.x, [0, 1], [rows(v.x), 2])),
    Sample("Slice", lambda v: take(blocks(v), [rows(v.x), 0], [rows(v.x), -1])),
    Sample("Slice", lambda v: take(blocks(v), [0, 0], [rows(v.x), 2])),
    Sample("Slice", lambda v: take(tf.tile(v.x, [1, 9]), [0, 1], [-1, rows(v.x)])),
    Sample("Slice", lambda v: take(total(v.x), [1], [2]), SUM),
    Sample("StridedSlice", lambda v: v.x[:, 1]),
    Sample("StridedSlice", lambda v: v.x[:, ::-1]),
    Sample("StridedSlice", lambda v: v.x[..., 1:]),
    Sample("StridedSlice", lambda v: v.x[tf.newaxis, ..., tf.newaxis, :2]),
    Sample("StridedSlice", lambda v: v("x", 2, 3)[:, 0, tf.newaxis, 1:]),
    Sample("StridedSlice", lambda v: v.x[: rows(v.x)]),
    Sample("StridedSlice", lambda v: blocks(v)[rows(v.x) :]),
    Sample("StridedSlice", lambda v: blocks(v)[: rows(v.x), 0]),
    Sample("StridedSlice", lambda v: tf.tile(v.x, [1, 9])[:, : rows(v.x)]),
    Sample("StridedSlice", lambda v: total(v.x)[1:], SUM),
    Sample("StridedSliceGrad", _put_back),
    Sample("Pad", lambda v: raw.Pad(input=v.x, paddings=PADS)),
    Sample("Pad", lambda v: raw.Pad(input=total(v.x), paddings=PADS[1:]), SUM),
    Sample("PadV2", lambda v: raw.PadV2(input=v.x, paddings=PADS, constant_values=3.0)),
]
# Their kernels take no empty batches.
MIRRORED = [
    op("MirrorPad", input=v.x, paddings=PADS, mode="REFLECT"),
    op("MirrorPad", SUM, input=lambda v: total(v.x), paddings=PADS[1:], mode="REFLECT"),
    op("MirrorPadGrad", input=v.x, paddings=[[0, 0], [1, 0]], mode="REFLECT"),
]
# Ops among others, and ops that are computed as a whole.
OTHERS = [
    Sample("ConcatV2", lambda v: concat(v.x, blocks(v)), WHOLE),
    Sample("ConcatV2", lambda v: concat(v.x, ROW[None]), WHOLE),
    Sample("StridedSlice", lambda v: v.x[1:] - v.x[:-1], WHOLE),
    Sample("StridedSlice", lambda v: v.x[0], WHOLE),
    Sample("StridedSlice", lambda v: v.x[::2], WHOLE),
    Sample("StridedSlice", lambda v: v.x[-1:], WHOLE),
    Sample("Slice", lambda v: take(v.x, [0, 0], [1, 2]), WHOLE),
    Sample("Unpack", lambda v: tf.unstack(tf.reshape(blocks(v), [2, -1, 3]), 2), WHOLE),
    Sample("Pad", lambda v: tf.pad(v.x, [[1, 0], [0, 0]]), WHOLE),
    Sample("PadV2", lambda v: tf.pad(total(v.x), [[1, 0]], constant_values=2.0), WHOLE),
    Sample("SplitV", lambda v: tf.split(blocks(v), [rows(v.x), -1]), WHOLE),
    Sample("Pack", lambda v: tf.stack([total(v.x), tf.reduce_max(v.x, 0)]), WHOLE),
    Sample("Mul", lambda v: blocks(v)[: rows(v.x)] * blocks(v)[rows(v.x) :]),
    Sample("Mean", lambda v: tf.reduce_mean(blocks(v)[rows(v.x) - rows(blocks(v)) :])),
]
