# SPDX-License-Identifier: Apache-2.0
"""Axes: shares, slices, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.graph.ir.placeholder import Value
from replicator.primitives import axes
from tests import helpers


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 4, 5, 9])
def test_shares_are_those_of_array_split(size: int, count: int) -> None:
    want = [len(share) for share in np.array_split(np.arange(size), count)]
    assert [axes.share(size, n, count) for n in range(count)] == want


@pytest.mark.parametrize("static", [[5, 4], [None, None], None], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_joining_what_was_cut_gives_it_back(axis: int, static: list | None) -> None:
    value = np.arange(20).reshape([5, 4])

    @tf.function(input_signature=[tf.TensorSpec(static, tf.int64)])
    def cut_and_join(x: tf.Tensor) -> list[tf.Tensor]:
        pieces = axes.cut(x, axis, 3)
        return [*pieces, axes.join(pieces, axis)]

    *pieces, whole = cut_and_join(value)
    for piece, want in zip(pieces, np.array_split(value, 3, axis), strict=True):
        np.testing.assert_array_equal(piece, want)
    np.testing.assert_array_equal(whole, value)


def test_a_new_axis_is_taken_apart() -> None:
    pieces = axes.cut(tf.constant([[1, 2], [3, 4]]), None, 2)
    assert [piece.numpy().tolist() for piece in pieces] == [[1, 2], [3, 4]]
    np.testing.assert_array_equal(axes.join(pieces, None), [[1, 2], [3, 4]])


def test_static_shapes() -> None:
    value = Value("int32", (5, None))
    assert axes.joined("x", value, None, 3).shape == (3, 5, None)
    assert axes.joined("x", value, 0, 3).shape == (None, None)
    assert axes.slice_of("x", value, 0, 1, 3).shape == (2, None)
    assert axes.slice_of("x", value, 0, 2, 3).shape == (1, None)
    assert axes.slice_of("x", value, -1, 0, 3).shape == (5, None)
    assert axes.slice_of("x", value, None, 0, 5).shape == (None,)
    unknown = Value("int32", None)
    assert axes.joined("x", unknown, None, 3) == unknown
    assert axes.slice_of("x", unknown, 7, 0, 3) == unknown


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_slices_of_given_sizes(count: int, known: bool) -> None:
    value = np.arange(8.0).reshape([4, 2])
    sizes = [4 - (count - 1), *[1] * (count - 1)]

    @tf.function
    def cut() -> Any:
        x = helpers.opaque(value, value.shape if known else [None, None])
        return axes.cut(x, 0, count, tf.constant(sizes))

    expected = np.split(value, np.cumsum(sizes)[:-1])
    for piece, want in zip(cut(), expected, strict=True):
        np.testing.assert_array_equal(piece, want)


@pytest.mark.parametrize("place", ["cond", "while"])
@pytest.mark.parametrize("primitive", ["reduce_scatter", "all_to_all", "scatter"])
def test_one_slice_inside_control_flow(primitive: str, place: str) -> None:
    """TensorFlow replaces a split into one there."""
    repl = helpers.make(1)

    def exchange(x: tf.Tensor) -> tf.Tensor:
        if primitive == "all_to_all":
            return repl.all_to_all(x, 0, 0)
        return getattr(repl, primitive)(x, axis=0)

    def step() -> tf.Tensor:
        x = helpers.opaque(np.float64([0.25, 1]))
        if place == "cond":
            return tf.cond(helpers.opaque(True), lambda: exchange(x) + x, lambda: x)
        turns = helpers.opaque(1)
        return tf.while_loop(
            lambda n, _: n < turns, lambda n, y: (n + 1, exchange(y) + y), [0, x]
        )[1]

    np.testing.assert_array_equal(repl.run(step)[0], [0.5, 2])
