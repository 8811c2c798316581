# SPDX-License-Identifier: Apache-2.0
"""Rules of ops that treat each row along some axes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.forms.laws import SUM, Inputs, Sample, forward, op, v

raw = tf.raw_ops


def of_vectors(types: str) -> list[Sample]:
    return [Sample(name, _of(name, lambda v: v("x", 2, 4))) for name in types.split()]


def of_matrices(types: str) -> list[Sample]:
    return [Sample(name, _of(name, matrix)) for name in types.split()]


def _of(name: str, value: Callable[[Inputs], tf.Tensor], **more: Any) -> Any:
    kernel = getattr(raw, name)
    first = next(iter(kernel.__signature__.parameters))
    return lambda v: kernel(**{first: value(v)}, **more)


def matrix(v: Inputs) -> tf.Tensor:
    """Returns symmetric positive matrices, whose decompositions are unique."""
    x = v("p", 3, 3)
    return x + tf.transpose(x, [0, 2, 1]) + np.diag([3.0, 5.0, 8.0]).astype("f")


def solve(name: str, **more: Any) -> Sample:
    kernel = getattr(raw, name)
    return Sample(name, lambda v: kernel(matrix=matrix(v), rhs=v("x", 3, 2), **more))


def fourier(name: str) -> Sample:
    """Returns a sample of a transform of the last 1, 2 or 3 axes."""
    kernel, axes = getattr(raw, name), int(name[-2]) if name.endswith("D") else 1
    lengths = [2, 2, 6 if name.startswith("IR") else 4][3 - axes :]
    value = _real if name.startswith("R") else _spectrum
    more = {"fft_length": lengths} if "RFFT" in name else {}
    return Sample(name, lambda v: kernel(input=value(v), **more))


def _real(v: Inputs) -> tf.Tensor:
    return v("x", 2, 2, 4)


def _spectrum(v: Inputs) -> tf.Tensor:
    return v("z", 2, 2, 4)


def one_hot(axis: int) -> Sample:
    given = {"depth": 4, "on_value": 1.0, "off_value": 0.0, "axis": axis}
    return Sample("OneHot", lambda v: raw.OneHot(indices=v.i, **given))


DIAGONAL = {"k": -1, "padding_value": 0.0}
SAMPLES = [
    *of_vectors("Softmax LogSoftmax MatrixDiag"),
    *of_matrices("MatrixDeterminant LogMatrixDeterminant MatrixInverse"),
    *of_matrices("MatrixSquareRoot Cholesky Lu MatrixDiagPart"),
    *[
        fourier(f"{i}{r}FFT{d}")
        for i in ("", "I")
        for r in ("", "R")
        for d in ("", "2D", "3D")
    ],
    op("MatrixLogarithm", input=lambda v: tf.cast(matrix(v), tf.complex64)),
    Sample(
        "Eig", lambda v: raw.Eig(input=matrix(v), Tout=tf.complex64, compute_v=False)[0]
    ),
    Sample(
        "SelfAdjointEigV2",
        lambda v: raw.SelfAdjointEigV2(input=matrix(v), compute_v=False)[0],
    ),
    Sample("SelfAdjointEigV2", lambda v: raw.SelfAdjointEigV2(input=matrix(v))),
    Sample("Qr", lambda v: raw.Qr(input=matrix(v))),
    Sample("Svd", lambda v: raw.Svd(input=matrix(v), compute_uv=False)[0]),
    op("MatrixBandPart", input=matrix, num_lower=0, num_upper=-1),
    forward("IsotonicRegression", input=v.x),
    Sample("NthElement", lambda v: raw.NthElement(input=v.x, n=1)),
    Sample("TopKV2", lambda v: raw.TopKV2(input=v.x, k=2)),
    op("CholeskyGrad", l=lambda v: tf.linalg.cholesky(matrix(v)), grad=matrix),
    solve("MatrixSolve"),
    solve("MatrixTriangularSolve"),
    solve("MatrixSolveLs", l2_regularizer=np.float64(0.1)),
    op("MatrixTriangularSolve", matrix=lambda v: tf.eye(3) * 2, rhs=v("x", 3, 2)),
    op(
        "TridiagonalSolve",
        diagonals=lambda v: v("p", 3, 3) + [[0.0], [4.0], [0.0]],
        rhs=v("x", 3, 2),
    ),
    op(
        "TridiagonalMatMul",
        superdiag=v("x", 1, 3),
        maindiag=v("y", 1, 3),
        subdiag=v("p", 1, 3),
        rhs=v("x", 3, 2),
    ),
    op("MatrixDiagPartV2", input=matrix, **DIAGONAL),
    op("MatrixDiagPartV3", input=matrix, **DIAGONAL),
    op("MatrixDiagPartV3", input=matrix, k=1, padding_value=0.0),
    op("MatrixDiagV2", diagonal=v.x, k=1, num_rows=-1, num_cols=-1, padding_value=0.0),
    op("MatrixDiagV3", diagonal=v("x", 2), num_rows=3, num_cols=3, **DIAGONAL),
    Sample("MatrixSetDiag", lambda v: raw.MatrixSetDiag(input=matrix(v), diagonal=v.x)),
    op("MatrixSetDiagV2", input=matrix, diagonal=v.x, k=0),
    op("MatrixSetDiagV3", input=matrix, diagonal=v.x, k=0),
    Sample("Cross", lambda v: raw.Cross(a=v.x, b=v.y)),
    Sample("RGBToHSV", lambda v: raw.RGBToHSV(images=v.p)),
    Sample("HSVToRGB", lambda v: raw.HSVToRGB(images=v.p)),
    Sample("AdjustHue", lambda v: raw.AdjustHue(images=v("p", 2, 2, 3), delta=0.2)),
    op("AdjustSaturation", images=v("p", 2, 2, 3), scale=0.2),
    op("AdjustContrastv2", images=v("p", 2, 2, 3), contrast_factor=2.0),
    op("LowerBound", sorted_inputs=lambda v: tf.sort(v.x), values=v.y),
    op("UpperBound", sorted_inputs=lambda v: tf.sort(v.x), values=v.y),
    Sample("Cumsum", lambda v: raw.Cumsum(x=v("x", 2, 3), axis=1, reverse=True)),
    Sample("Cumsum", lambda v: raw.Cumsum(x=tf.reduce_sum(v.x, 0), axis=0), SUM),
    Sample("Cumprod", lambda v: raw.Cumprod(x=v.p, axis=-1, exclusive=True)),
    Sample("CumulativeLogsumexp", lambda v: raw.CumulativeLogsumexp(x=v.x, axis=1)),
    Sample("ReverseV2", lambda v: raw.ReverseV2(tensor=v("x", 2, 3), axis=[-1, 1])),
    op("ReverseV2", SUM, tensor=lambda v: tf.reduce_sum(v.x, 0), axis=[0]),
    Sample("Roll", lambda v: raw.Roll(input=v("x", 2, 3), shift=[1, 2], axis=[1, 2])),
    Sample("ArgMax", lambda v: raw.ArgMax(input=v("x", 2, 3), dimension=1)),
    Sample("ArgMin", lambda v: raw.ArgMin(input=tf.transpose(v.x), dimension=0)),
    op("ReverseSequence", input=v("x", 5), seq_lengths=v("i"), seq_dim=1),
    op(
        "ReverseSequence",
        input=lambda v: tf.transpose(v("x", 5)),
        seq_lengths=v("i"),
        seq_dim=0,
        batch_dim=1,
    ),
    op(
        "ReverseSequence",
        input=v("x", 4, 2),
        seq_lengths=[1, 3],
        seq_dim=1,
        batch_dim=2,
    ),
    *map(one_hot, (-1, 0, 1)),
]
