# SPDX-License-Identifier: Apache-2.0
"""What is told of products of matrices and their like is true of parts of a batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist.kinds import Kind
from tests.autodist.helpers import known, told

Make = Callable[[tf.Tensor], tf.Tensor]
C = np.arange(1.0, 13.0, dtype=np.float32).reshape(2, 3, 2) / 10


def _count(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.shape(x)[0], tf.float32)


def _ones(x: tf.Tensor) -> tf.Tensor:
    return tf.ones([tf.shape(x)[0], 2])


def _across(x: tf.Tensor) -> tf.Tensor:  # [3, n]
    return tf.transpose(x)


def _stack(x: tf.Tensor) -> tf.Tensor:  # [n, 2, 3]
    return tf.stack([x, tf.square(x)], 1)


def _images(x: tf.Tensor) -> tf.Tensor:  # [n, 3, 3, 2]
    return tf.reshape(x @ np.arange(54.0).reshape(3, 18).astype("f"), [-1, 3, 3, 2])


def _pooled(x: tf.Tensor) -> tf.Tensor:  # [n, 2, 2, 2]
    return _images(x)[:, :2, :2] ** 2


SIZES = {"strides": [1, 1, 1, 1], "padding": "VALID"}


def _filters(images: tf.Tensor, gradient: tf.Tensor, depthwise: bool) -> tf.Tensor:
    name = "DepthwiseConv2dNative" if depthwise else "Conv2D"
    return getattr(tf.raw_ops, f"{name}BackpropFilter")(
        input=images,
        filter_sizes=[2, 2, 2, 1 if depthwise else 2],
        out_backprop=gradient,
        **SIZES,
    )


def _averaged(x: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.AvgPoolGrad(
        orig_input_shape=tf.shape(_images(x)),
        grad=gradient,
        ksize=[1, 2, 2, 1],
        **SIZES,
    )


VALUES: dict[str, tuple[Make, Kind, float]] = {
    "rows times a matrix": (lambda x: x @ C[0], Kind.ROWS, 0),
    "a matrix times columns": (
        lambda x: tf.matmul(C[0], _across(x), transpose_a=True),
        *(Kind.ROWS, 0),
    ),
    "a matrix times rows": (
        lambda x: tf.matmul(C[0], x, transpose_a=True, transpose_b=True),
        *(Kind.ROWS, 0),
    ),
    "columns times a matrix": (
        lambda x: tf.matmul(_across(x), C[0], transpose_a=True),
        *(Kind.ROWS, 0),
    ),
    "over examples": (lambda x: tf.matmul(x, x, transpose_a=True), Kind.MEAN, 1),
    "of columns": (lambda x: tf.matmul(_across(x), x), Kind.MEAN, 1),
    "over them, over n": (
        lambda x: tf.matmul(x / _count(x), x, transpose_a=True),
        *(Kind.MEAN, 0),
    ),
    "times n": (lambda x: (x * _count(x)) @ (C[0] * _count(x)), Kind.ROWS, 2),
    "n times zeros": (lambda x: (x * _count(x)) @ tf.zeros([3, 2]), Kind.ROWS, 1),
    "ones added up": (
        lambda x: tf.matmul(_ones(x), _ones(x), transpose_a=True),
        *(Kind.SAME, 1),
    ),
    "a matrix for each": (lambda x: _stack(x) @ C[0], Kind.ROWS, 0),
    "a matrix for all": (lambda x: _stack(x) @ C[:1], Kind.ROWS, 0),
    "examples in the middle": (lambda x: tf.stack([x, -x]) @ C, Kind.ROWS, 0),
    "examples in front of the last": (
        lambda x: tf.matmul(C, tf.stack([x, -x]), adjoint_a=True, adjoint_b=True),
        *(Kind.ROWS, 0),
    ),
    "each with itself": (
        lambda x: tf.matmul(_stack(x), _stack(x), adjoint_b=True),
        *(Kind.ROWS, 0),
    ),
    "all pairs": (lambda x: tf.matmul(x, x, transpose_b=True), Kind.UNKNOWN, 0),
    "some with others": (
        lambda x: tf.matmul(
            tf.boolean_mask(x, x[:, 0] > 0),
            tf.boolean_mask(x, x[:, 1] > 0),
            transpose_a=True,
        ),
        *(Kind.UNKNOWN, 0),
    ),
    "unknown rank": (
        lambda x: x @ tf.compat.v1.placeholder_with_default(C[0], None),
        *(Kind.UNKNOWN, 0),
    ),
    # Einsum.
    "rows": (lambda x: tf.einsum("ni,ij->nj", x, C[0]), Kind.ROWS, 0),
    "columns": (lambda x: tf.einsum("ij, ni -> jn", C[0], x), Kind.ROWS, 0),
    "transposed": (lambda x: tf.einsum("nij->jin", _stack(x)), Kind.ROWS, 0),
    "a sum": (lambda x: tf.einsum("ni->i", x), Kind.MEAN, 1),
    "a sum of products": (lambda x: tf.einsum("ni,nj->ij", x, x), Kind.MEAN, 1),
    "all rows": (lambda x: tf.einsum("ni,ni->n", x, x), Kind.ROWS, 0),
    "a number": (lambda x: tf.einsum("ni,ni->", x, x / _count(x)), Kind.MEAN, 0),
    "how many": (lambda x: tf.einsum("ni->i", _ones(x)), Kind.SAME, 1),
    "dots": (lambda x: tf.einsum("...i,ij->...j", _stack(x), C[0]), Kind.ROWS, 0),
    "dots of two ranks": (
        lambda x: tf.einsum("...ij,...jk->...ik", _stack(x), C[0]),
        *(Kind.ROWS, 0),
    ),
    "dots for nothing": (lambda x: tf.einsum("ni...,ij->...nj", x, C[0]), Kind.ROWS, 0),
    "pairs": (lambda x: tf.einsum("ni,mi->nm", x, x), Kind.UNKNOWN, 0),
    "dots of unknown rank": (
        lambda x: tf.einsum(
            "...i,ij->...j", x, tf.compat.v1.placeholder_with_default(C[0], None)
        ),
        *(Kind.UNKNOWN, 0),
    ),
    # Gradients of convolutions.
    "a filter's": (lambda x: _filters(_images(x), _pooled(x), False), Kind.MEAN, 1),
    "a filter's of each channel": (
        lambda x: _filters(_images(x) / _count(x), _pooled(x), True),
        *(Kind.MEAN, 0),
    ),
    "a filter's, of ones": (
        lambda x: _filters(_images(x) * 0 + 1, tf.ones_like(_pooled(x)), False),
        *(Kind.MEAN, 1),
    ),
    "a filter's of constants": (
        lambda x: _filters(_images(x), tf.ones([7, 2, 2, 2]), False),
        *(Kind.UNKNOWN, 0),
    ),
    "a filter's of some": (
        lambda x: _filters(
            tf.boolean_mask(_images(x), x[:, 0] > 0),
            tf.boolean_mask(_pooled(x), x[:, 1] > 0),
            False,
        ),
        *(Kind.UNKNOWN, 0),
    ),
    "an average's": (lambda x: _averaged(x, _pooled(x)), Kind.ROWS, 0),
    "an average's, times n": (
        lambda x: _averaged(x, _pooled(x) * _count(x)),
        *(Kind.ROWS, 1),
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_told_is_true_of_parts(name: str) -> None:
    make, kind, power = VALUES[name]
    value = told(make)
    assert (value.kind, value.power) == (kind, power)


def test_a_batch_of_matrices_is_not_one_for_each_example() -> None:
    assert known(lambda x: _stack(x)[:, None] @ C)[1].kind is Kind.ROWS
    matrices = np.ones([7, 3, 2], np.float32)
    assert known(lambda x: _stack(x) @ matrices)[1].kind is Kind.UNKNOWN


def test_random_factors_leave_rows_and_numbers_of_examples_scale_these() -> None:
    _, value = known(lambda x: x @ tf.random.normal([3, 2]))
    assert value.kind is Kind.ROWS and value.mixed is None
    _, value = known(lambda x: _ones(x) @ tf.random.normal([2, 2]))
    assert value.kind is Kind.ROWS


def test_factors_of_the_whole_batch_are_named() -> None:
    product, value = known(
        lambda x: x @ tf.tile(tf.reduce_mean(x, 0, keepdims=True), [3, 1])
    )
    (whole,) = value.wholes
    assert value.kind is Kind.ROWS and value.mixed is None
    assert whole.tensor is product.op.inputs[1]
