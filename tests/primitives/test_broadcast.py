# SPDX-License-Identifier: Apache-2.0
"""broadcast: any dtype, from any root, and its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers

DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "complex64", "string"]


@pytest.mark.parametrize("root", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_from_every_root(dtype: str, root: int) -> None:
    values = np.array([[0, 1], [1, 0], [1, 1]])
    repl = helpers.make(3)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        operand = helpers.opaque(values[repl.replica_id])
        x = tf.as_string(operand) if dtype == "string" else tf.cast(operand, dtype)
        y = repl.broadcast(x, root)
        return y, tf.strings.to_number(y) if dtype == "string" else tf.cast(y, tf.int64)

    received, numbers = repl.run(step)
    for y, number in zip(received, numbers, strict=True):
        assert y.dtype == dtype
        np.testing.assert_array_equal(number, values[root])


@pytest.mark.parametrize("mode", helpers.MODES)
def test_any_nest(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        r = repl.replica_id
        return repl.broadcast({"b": [helpers.opaque(r), "text"], "a": ()}, root=1)

    result = helpers.run(mode, repl, lambda: step)
    assert [int(x) for x in result["b"][0]] == [1, 1]
    assert list(result["b"][1]) == [b"text", b"text"]


def test_an_empty_nest_comes_back() -> None:
    repl = helpers.make(2)
    assert repl.run(lambda: repl.broadcast([])) == []


def test_only_leaves_of_numbers_are_differentiated() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        x = helpers.opaque(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            n, y, name = repl.broadcast((tf.constant(3), x, "x"), root=1)
            loss = y * tf.cast(n, tf.float32)
        return tape.gradient(loss, x), name

    assert [float(d) for d in repl.run(step)[0]] == [0.0, 6.0]


@pytest.mark.parametrize("root", [-1, 2, True, 1.0, None, "0", np.int64(1)], ids=repr)
def test_a_root_that_is_no_replica_is_refused(root: Any) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError,
        match=r"(?s)broadcast on replica 0 was given root=.*at tests.*Fix: .*root",
    ):
        repl.run(lambda: repl.broadcast(1.0, root))


def test_slices_are_refused() -> None:
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError, match=r"(?s)cannot send IndexedSlices.*values and indices"
    ):
        repl.run(lambda: repl.broadcast(tf.IndexedSlices(tf.ones([1]), [0], [3])))


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("sizes", [[2, 3], [None, 3], None], ids=str)
def test_the_others_may_hand_in_specs(sizes: Any, mode: str) -> None:
    values = np.arange(6.0).reshape([2, 3])
    repl = helpers.make(3)

    def step() -> Any:
        if repl.replica_id == 1:
            value = {"x": helpers.opaque(values), "n": helpers.opaque(7)}
        else:
            spec = tf.TensorSpec(sizes, tf.float64)
            value = {"x": spec, "n": tf.TensorSpec([], tf.int32)}
        received = repl.broadcast(value, root=1)
        assert received["x"].shape.is_compatible_with([2, 3])
        return received

    result = helpers.run(mode, repl, lambda: step)
    for x, n in zip(result["x"], result["n"], strict=True):
        np.testing.assert_array_equal(x, values)
        assert int(n) == 7


def test_a_spec_that_what_comes_does_not_fit_is_an_error() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(tf.ones([3]), [None])
        return repl.broadcast(tf.TensorSpec([2]) if repl.replica_id else x)

    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"(?s)expect, \[2\]\..* on replica 0: \[3\]",
    ):
        repl.run(step)


def test_gradients_come_back_from_tensors_like_what_is_to_come() -> None:
    repl = helpers.make(3)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        r = repl.replica_id
        x = helpers.opaque(5.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.broadcast(x**2 if r == 2 else x, root=2)
            loss = (r + 1.0) * y
        return y, tape.gradient(loss, x)

    y, d = repl.run(step)
    assert [float(v) for v in y] == [25.0] * 3
    assert [float(v) for v in d] == [0.0, 0.0, 60.0]
