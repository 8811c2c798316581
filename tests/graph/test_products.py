"""Products of few rows with a large transposed matrix, turned around."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.graph import products

RNG = np.random.default_rng(0)


def _product(
    rows: tuple[int | None, int],
    matrix: tuple[int, int],
    transpose_a: bool = False,
    transpose_b: bool = True,
) -> tf.Operation:
    """Returns the MatMul of a graph with one."""
    with tf.Graph().as_default():
        return tf.linalg.matmul(
            tf.compat.v1.placeholder("float32", rows),
            tf.compat.v1.placeholder("float32", matrix),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
        ).op


@pytest.mark.parametrize("matrix", [(512, 512), (2048, 512), (256, 1024)])
def test_few_rows_and_a_large_matrix(matrix: tuple[int, int]) -> None:
    assert products.pays(_product((64, matrix[1]), matrix))


@pytest.mark.parametrize(
    "arguments",
    [
        {"rows": (256, 512), "matrix": (512, 512)},
        {"rows": (16, 256), "matrix": (256, 256)},
        {"rows": (64, 8192), "matrix": (64, 8192)},
        {"rows": (None, 512), "matrix": (512, 512)},
        {"rows": (64, 512), "matrix": (512, 512), "transpose_b": False},
        {"rows": (512, 64), "matrix": (512, 512), "transpose_a": True},
    ],
    ids=str,
)
def test_others_are_left_alone(arguments: dict[str, Any]) -> None:
    assert not products.pays(_product(**arguments))


def test_the_product_is_the_same() -> None:
    rows = RNG.standard_normal((8, 48))
    matrix = RNG.standard_normal((32, 48))

    @tf.function
    def turned() -> tf.Tensor:
        return products.turned(tf.linalg.matmul(rows, matrix, transpose_b=True).op)

    np.testing.assert_allclose(turned(), rows @ matrix.T, rtol=1e-12)
