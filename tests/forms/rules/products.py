# SPDX-License-Identifier: Apache-2.0
"""Rules of products, and of ops that treat each example alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.forms.laws import SUM, Inputs, Sample, op, v

raw = tf.raw_ops
RANDOM = np.random.default_rng(0)


def constant(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def einsum(
    equation: str, *make: Callable[[Inputs], Any], form: str = "sharded"
) -> Sample:
    return op(
        "Einsum", form, inputs=lambda v: [one(v) for one in make], equation=equation
    )


def slopes(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
    return tf.gradients(tf.sin(tf.matmul(x, y)), [x, y])


MATRIX, CUBE = constant(3, 4), constant(2, 4, 3)
SAMPLES = [
    Sample("MatMul", lambda v: raw.MatMul(a=v.x, b=MATRIX)),
    op("MatMul", a=MATRIX, b=v.x, transpose_a=True, transpose_b=True),
    Sample("MatMul", lambda v: raw.MatMul(a=v.x, b=v("y", 4), transpose_a=True), SUM),
    Sample("MatMul", lambda v: raw.MatMul(a=v.x, b=v.y, transpose_b=True)),
    op("MatMul", SUM, a=lambda v: tf.matmul(v.x, v.y, transpose_a=True), b=MATRIX),
    Sample("SparseMatMul", lambda v: raw.SparseMatMul(a=v.x, b=MATRIX)),
    Sample("BatchMatMul", lambda v: raw.BatchMatMul(x=v("x", 2, 3), y=v("y", 3, 2))),
    Sample("BatchMatMulV2", lambda v: raw.BatchMatMulV2(x=v("x", 2, 3), y=MATRIX)),
    op("BatchMatMulV2", x=v("x", 1, 5, 3), y=v("y", 2, 4, 3), adj_y=True),
    op("BatchMatMulV2", x=v.x, y=CUBE, adj_x=False, adj_y=True),
    op(
        "BatchMatMulV2",
        SUM,
        x=lambda v: tf.transpose(v("x", 2, 3), [1, 2, 0]),
        y=v("y", 4),
    ),
    op("BatchMatMulV3", x=v("x", 2, 3), y=MATRIX, Tout=tf.float32),
    # Gradients of matrices are summed where these broadcast: along which axes, only
    # the runtime knows.
    Sample("Reshape", lambda v: slopes(v("x", 2, 3), v("y", 3, 2)), grads=False),
    Sample("Reshape", lambda v: slopes(v("x", 1, 5, 3), v("y", 2, 3, 4)), grads=False),
    Sample(
        "BatchMatMulV2",
        lambda v: tf.matmul(v.x[:, None, :, None], v.x[None, :, None]),
    ),
    einsum("nd,dh->nh", lambda v: v.x, lambda v: MATRIX),
    einsum("nqhd,nkhd->nhqk", lambda v: v("x", 4, 2, 3), lambda v: v("y", 5, 2, 3)),
    einsum("nhqk,nkhd->nqhd", lambda v: v("x", 2, 4, 5), lambda v: v("y", 5, 2, 3)),
    einsum("...d,dh->...h", lambda v: v("x", 2, 3), lambda v: MATRIX),
    einsum("...d,...d->...", lambda v: v("x", 2, 3), lambda v: CUBE[:, 0]),
    einsum("nd,ne->de", lambda v: v.x, lambda v: v("y", 4), form=SUM),
    einsum("nd->d", lambda v: v.x, form=SUM),
    einsum("nd->dn", lambda v: v.x),
    einsum("nd,md->nm", lambda v: v.x, lambda v: v.y),
    einsum(
        "de,eh->dh",
        lambda v: tf.matmul(v.x, v.y, transpose_a=True),
        lambda v: MATRIX,
        form=SUM,
    ),
    Sample("L2Loss", lambda v: raw.L2Loss(t=v.x), SUM),
    Sample("BiasAdd", lambda v: raw.BiasAdd(value=v.x, bias=[1.0, 2.0, 3.0])),
    Sample("BiasAddV1", lambda v: raw.BiasAddV1(value=v.x, bias=[1.0, 2.0, 3.0])),
    op("BiasAdd", value=v("x", 2, 3), bias=[1.0, 2.0], data_format="NCHW"),
    Sample("BiasAddGrad", lambda v: raw.BiasAddGrad(out_backprop=v.x), SUM),
    op("BiasAddGrad", out_backprop=lambda v: tf.transpose(v.x)),
]
