# SPDX-License-Identifier: Apache-2.0
"""Tensors of any kind are reduced by their compressors, which each see their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import replicator
from replicator import compressors
from replicator.compressors import reducing
from replicator.compressors.memory import Memory, StateStore
from tests import helpers


class Noted(compressors.Compressor):
    """Sums exactly, and notes how many tensors it was given; compares by identity."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def reduce(self, tensors: Any, link: Any) -> compressors.Sums:
        self.counts.append(len(tensors))
        return compressors.Sums(totals=link.sum(tensors), sent=tensors)


ROWS = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 2]), tf.constant([4, 3]))


@pytest.mark.parametrize(
    ("spec", "leaf", "can"),
    [
        ("int8", tf.zeros([2]), True),
        ("int8", tf.zeros([2], tf.bfloat16), True),
        ("int8", tf.zeros([2], tf.int32), False),
        ("int8", tf.zeros([2], tf.complex64), False),
        ("int8", ROWS, False),
        ("bf16", ROWS, True),
        ("none", tf.zeros([2]), False),
    ],
)
def test_what_can_be_compressed(spec: str, leaf: Any, can: bool) -> None:
    compressor = compressors.parse(spec)
    assert reducing.can_compress(compressor, leaf) is can


@given(st.lists(st.integers(-1, 4), max_size=12))
def test_each_compressor_gets_all_of_its_tensors_once(numbers: list[int]) -> None:
    """Those of equal texts are one; those of a user's class are, if the same object."""
    own = [Noted(), Noted()]
    specs = ["int8", "topk(ratio=0.5)", "topk(ratio=0.1)"]
    chosen = [
        None if n < 0 else own[n] if n < 2 else compressors.parse(specs[n - 2])
        for n in numbers
    ]
    groups = reducing._by_compressor(chosen)
    expected: dict[int, list[int]] = {}
    for k, n in enumerate(numbers):
        if n >= 0:
            expected.setdefault(n, []).append(k)
    assert [indices for _, indices in groups] == [*expected.values()]
    for compressor, indices in groups:
        assert all(chosen[k] == compressor for k in indices)


@pytest.mark.parametrize(
    ("op", "weights"),
    [("sum", None), ("mean", None), ("mean", (1.0, 3.0)), ("mean", (0.0, 2.0))],
)
def test_results_are_in_the_order_of_tensors(op: str, weights: Any) -> None:
    """Dense and sparse ones and, in sums, integers; compressed or not."""
    random = np.random.default_rng(0)
    values = [*random.standard_normal([3, 2, 4]).astype("f")]
    if op == "sum":
        values.append(np.array([[2, 4], [4, 8]]))
    noted, other = Noted(), Noted()
    chosen = [noted, None, other, noted][: len(values)]
    cast = compressors.parse("bf16")
    repl = helpers.make(2)
    place = StateStore(Memory().group("x"), "all_reduce")

    def step_fn(r: tf.Tensor, weight: tf.Tensor) -> Any:
        row = tf.cast(tf.fill([1, 2], r + 1), tf.float32)
        rows = tf.IndexedSlices(row, r[None], tf.constant([3, 2]))
        leaves = [*(tf.gather(tf.constant(x), r) for x in values), rows]
        call = reducing.ReduceArguments(op, (0, 1), weight if weights else None, place)
        found = reducing.reduce(call, leaves, [*chosen, cast])
        return list(map(tf.convert_to_tensor, found))

    shares = weights or (1.0, 1.0)
    by = np.array(shares) / (sum(shares) if op == "mean" else 1)
    found = repl.run(
        step_fn,
        args=[
            replicator.PerReplica(tf.constant(0), tf.constant(1)),
            replicator.PerReplica(*map(tf.constant, shares)),
        ],
    )
    for r in (0, 1):
        *dense, rows = (x[r].numpy() for x in found)
        for actual, of_replicas in zip(dense, values, strict=True):
            expected = np.tensordot(by, of_replicas, 1)
            np.testing.assert_allclose(actual, expected, rtol=1e-6)
        expected = [[by[0]] * 2, [2 * by[1]] * 2, [0, 0]]
        np.testing.assert_allclose(rows, expected, rtol=1e-2)
    assert set(noted.counts) == set(other.counts) == {1}  # integers are not for it


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_weighs_nothing_is_nothing(dtype: tf.DType, bad: float) -> None:
    x = tf.constant([bad, 2.0], dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        share = reducing._scaled(x, tf.constant(0.0, tf.float64))
    assert share.dtype == (tf.float64 if dtype == tf.float64 else tf.float32)
    np.testing.assert_array_equal(share, [0.0, 0.0])
    np.testing.assert_array_equal(tape.gradient(share, x), [0.0, 0.0])
    half = reducing._scaled(x, tf.constant(0.5, tf.float64))
    np.testing.assert_array_equal(half, [bad, 1.0])
