# SPDX-License-Identifier: Apache-2.0
"""The tensors that are recognised as sums of matrix products by their factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.matching import factors

ROWS, M, N = 3, 5, 4


def _matrix(*shape: int | None, dtype: Any = tf.float32) -> tf.Tensor:
    return tf.compat.v1.placeholder(dtype, shape)


def _find(make: Callable[[int], tf.Tensor]) -> Any:
    """Searches the operands from `make` on each of two replicas for factors."""
    with tf.Graph().as_default():
        column = [make(r) for r in range(2)]
        tf.raw_ops.PyFuncStateless(input=column, token="t", Tout=[tf.float32])
        return factors.find(column)


def _product(rows: Any = ROWS, m: Any = M, n: Any = N, dtype: Any = tf.float32) -> Any:
    x, dy = _matrix(rows, m, dtype=dtype), _matrix(rows, n, dtype=dtype)
    return tf.matmul(x, dy, transpose_a=True)


RECOGNISED = {
    "x^T dy": lambda r: _product(),
    "any number of rows": lambda r: _product(rows=None),
    "another number of rows on each": lambda r: _product(rows=2 + r),
    "x dy": lambda r: tf.matmul(_matrix(M, ROWS), _matrix(ROWS, N)),
    "x dy^T": lambda r: tf.matmul(_matrix(M, ROWS), _matrix(N, ROWS), transpose_b=True),
    "x^T dy^T": lambda r: tf.matmul(
        _matrix(ROWS, M), _matrix(N, ROWS), transpose_a=True, transpose_b=True
    ),
    "rows of rank 3": lambda r: tf.matmul(
        tf.reshape(_matrix(None, 7, M), [-1, M]),
        tf.reshape(_matrix(None, 7, N), [-1, N]),
        transpose_a=True,
    ),
    "scaled by a constant": lambda r: _product() * 0.5,
    "scaled by a tensor of its own": lambda r: _matrix() * _product(),
    "divided": lambda r: _product() / _matrix(),
    "transposed": lambda r: tf.transpose(_product()),
    "reshaped": lambda r: tf.reshape(_product(), [M * N]),
    "all of these": lambda r: tf.reshape(
        tf.transpose(tf.identity(_product()) * 2.0) / 3.0, [N, M, 1]
    ),
    "16-bit floats": lambda r: _product(dtype=tf.bfloat16),
    "cast to a wider dtype": lambda r: tf.cast(_product(dtype=tf.float16), tf.float32),
}


@pytest.mark.parametrize("case", RECOGNISED)
def test_recognised(case: str) -> None:
    actual = _find(RECOGNISED[case])
    assert [type(product) for product in actual] == [factors.Product] * 2
    for product in actual:
        assert {product.left.width, product.right.width} == {M, N}


def _read_twice(r: int) -> tf.Tensor:
    product = _product()
    tf.sin(product)
    return product


def _waited_for(r: int) -> tf.Tensor:
    product = _product()
    with tf.control_dependencies([product]):
        tf.constant(1.0)
    return product


def _read_before_scaling(r: int) -> tf.Tensor:
    product = _product()
    tf.norm(product)
    return product * 2.0


LEFT_ALONE = {
    "no product": lambda r: _matrix(M, N),
    "read by another op": _read_twice,
    "waited for by another op": _waited_for,
    "read before it is scaled": _read_before_scaling,
    "clipped": lambda r: tf.clip_by_value(_product(), -1.0, 1.0),
    "a sum of two": lambda r: _product() + _product(),
    "scaled by a vector": lambda r: _product() * _matrix(N),
    "divided into": lambda r: 2.0 / _product(),
    "a product on one replica only": lambda r: _matrix(M, N) if r else _product(),
    "other transposes": lambda r: (
        _product() if r else tf.matmul(_matrix(M, ROWS), _matrix(ROWS, N))
    ),
    "reshaped on one replica": lambda r: (
        tf.reshape(_product(m=N, n=M), [M, N]) if r else _product()
    ),
    "integers": lambda r: _product(dtype=tf.int32),
    "complex": lambda r: _product(dtype=tf.complex64),
    "rounded before it is reduced": lambda r: tf.cast(_product(), tf.bfloat16),
    "cast to more digits": lambda r: tf.cast(_product(), tf.float64),
    "cast to more digits from 16 bits": lambda r: tf.cast(
        _product(dtype=tf.float16), tf.float64
    ),
    "unknown sizes": lambda r: _product(m=None),
    "transposed by an unknown permutation": lambda r: tf.transpose(
        _product(), _matrix(2, dtype=tf.int32)
    ),
    "a product per example": lambda r: tf.matmul(
        _matrix(7, ROWS, M), _matrix(7, ROWS, N), transpose_a=True
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(case: str) -> None:
    assert _find(LEFT_ALONE[case]) is None


def test_what_is_handed_in_twice_is_left_alone() -> None:
    with tf.Graph().as_default():
        columns = [[_product(), _product()]] * 2
        for k in range(2):
            pair = [column[k] for column in columns]
            tf.raw_ops.PyFuncStateless(input=pair, token="t", Tout=[tf.float32])
        assert factors.find(columns[0]) is None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda dy: tf.reduce_sum(dy, 0), True),
        (lambda dy: tf.raw_ops.BiasAddGrad(out_backprop=dy), True),
        (lambda dy: 2.0 * tf.reduce_sum(dy, [0]), True),
        (lambda dy: tf.reduce_sum(dy, 1), False),
        (lambda dy: tf.reduce_sum(dy), False),
        (lambda dy: tf.reduce_sum(dy, 0, keepdims=True), False),
        (lambda dy: tf.reduce_mean(dy, 0), False),
    ],
)
def test_sums_of_rows(make: Any, expected: bool) -> None:
    actual = _find(lambda r: make(_matrix(ROWS, N)))
    assert isinstance(actual and actual[0], factors.RowSum) == expected


def test_sums_of_rows_of_higher_rank() -> None:
    def of(axes: Any) -> Any:
        return _find(lambda r: tf.reduce_sum(_matrix(2, ROWS, N), axes))

    assert isinstance(of([0, 1])[0], factors.RowSum)
    assert isinstance(of([-3, 1])[0], factors.RowSum)
    assert of([0, 2]) is None
    assert of([0]) is None
    nchw = _find(
        lambda r: tf.raw_ops.BiasAddGrad(
            out_backprop=_matrix(2, N, 3, 3), data_format="NCHW"
        )
    )
    assert nchw is None


def test_the_same_rows_are_found_under_another_shape() -> None:
    with tf.Graph().as_default():
        dy = _matrix(None, 7, N)
        flat = tf.identity(tf.reshape(dy, [-1, N]))
        assert factors.origin(flat) is dy
        assert factors.origin(dy) is dy
        cut = tf.reshape(dy, [-1, 7 * N])
        assert factors.origin(cut) is cut


def test_rows_are_guessed_where_the_batch_size_is_unknown() -> None:
    with tf.Graph().as_default():
        factor = factors.Factor(_matrix(12, N), 0)
        unknown = factors.Factor(_matrix(None, N), 0)
        flat = factors.Factor(tf.reshape(_matrix(None, 7, N), [-1, N]), 0)
        assert factor.rows == 12
        assert flat.rows == 7 * unknown.rows
