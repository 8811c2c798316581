# SPDX-License-Identifier: Apache-2.0
"""all_to_all: slices of equal and of different sizes, there and back again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers

R = 3
DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "complex64", "string"]
# SPLITS[s][d]: how many rows replica s sends to replica d.
SPLITS = np.array([[2, 0, 1], [0, 0, 4], [3, 1, 0]])


def _values(shape: Any) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 100, [R, *shape])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    values = _values([6, 2]) % 2
    repl = helpers.make(R)

    def step() -> tf.Tensor:
        x = helpers.opaque(values[repl.replica_id])
        x = tf.as_string(x) if dtype == "string" else tf.cast(x, dtype)
        y = repl.all_to_all(x, 0, 1)
        assert y.dtype == dtype and y.shape == [2, 6]
        return tf.strings.to_number(y) if dtype == "string" else tf.cast(y, tf.int64)

    for d, result in enumerate(repl.run(step)):
        want = np.concatenate([x[2 * d : 2 * d + 2] for x in values], axis=1)
        np.testing.assert_array_equal(result, want)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("static", [(), [None, 6, None], None], ids=str)
@pytest.mark.parametrize(("split_axis", "concat_axis"), [(1, 0), (-2, 2), (1, 1)])
def test_back_with_the_axes_exchanged(
    split_axis: int, concat_axis: int, static: Any, mode: str
) -> None:
    values = _values([2, 6, 3])
    repl = helpers.make(R)

    def step() -> tf.Tensor:
        x = helpers.opaque(values[repl.replica_id], static)
        there = repl.all_to_all(x, split_axis, concat_axis)
        return repl.all_to_all(there, concat_axis, split_axis)

    for x, back in zip(values, helpers.run(mode, repl, lambda: step), strict=True):
        np.testing.assert_array_equal(back, x)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("known", [True, False], ids=["list", "tensor"])
def test_unequal_splits_with_zeros_among_them(known: bool, mode: str) -> None:
    """And their gradients, which need the sizes as well."""
    parts = [np.random.RandomState(s).rand(sum(SPLITS[s]), 2) for s in range(R)]
    cut = [np.split(x, np.cumsum(n)[:-1]) for x, n in zip(parts, SPLITS, strict=True)]
    repl = helpers.make(R)

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        r = repl.replica_id
        splits = SPLITS[r].tolist() if known else helpers.opaque(SPLITS[r])
        x = helpers.opaque(parts[r])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_to_all(x, 0, 0, splits)
            loss = (r + 1.0) * tf.reduce_sum(y**3)
        back = repl.all_to_all(y, 0, 0, splits=SPLITS[:, r].tolist())
        return y, back, tape.gradient(loss, x)

    received, back, gradients = helpers.run(mode, repl, lambda: step)
    for d in range(R):
        np.testing.assert_array_equal(received[d], np.concatenate([c[d] for c in cut]))
        np.testing.assert_array_equal(back[d], parts[d])
        weights = np.repeat(np.arange(1.0, R + 1), SPLITS[d])[:, None]
        np.testing.assert_allclose(gradients[d], 3 * weights * parts[d] ** 2)


def test_unequal_splits_along_another_axis() -> None:
    """Row counts differ by replica; all send the same number of columns to each."""
    splits, rows = [1, 0, 4], [2, 0, 3]
    parts = [np.random.RandomState(s).rand(n, 5) for s, n in enumerate(rows)]
    repl = helpers.make(R)

    def step() -> tf.Tensor:
        r = repl.replica_id
        y = repl.all_to_all(helpers.opaque(parts[r]), 1, 0, splits)
        assert y.shape.as_list() == [None, splits[r]]
        return y

    whole = np.concatenate(parts)
    for r, result in enumerate(repl.run(step)):
        np.testing.assert_array_equal(result, np.split(whole, [1, 1], 1)[r])


def test_any_nest() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        names = tf.constant([f"{repl.replica_id}{d}" for d in range(2)])
        numbers = helpers.opaque([repl.replica_id, 7])
        nest = repl.all_to_all({"b": [names, numbers], "a": ()}, 0, 0)
        splits = repl.all_to_all((names, numbers), 0, 0, splits=[1, 1])
        return nest, splits, repl.all_to_all([], 0, 0)

    (nest, splits, empty) = repl.run(step)
    for names, numbers in (nest["b"], splits):
        assert list(names[1].numpy()) == [b"01", b"11"]
        assert list(numbers[0].numpy()) == [0, 1]
    assert empty == []


BAD = {
    "split_axis": (
        lambda repl: repl.all_to_all(tf.ones([2]), 1, 0),
        "split_axis=1 for",
        "split_axis lies between -1 and 0",
    ),
    "concat_axis": (
        lambda repl: repl.all_to_all(tf.ones([2]), 0, None),
        "concat_axis=None",
        "concat_axis is a Python int",
    ),
    "scalar": (
        lambda repl: repl.all_to_all(1.0, 0, 0),
        r"split_axis=0 for float32\[\]",
        "a scalar has no axis",
    ),
    "remainder": (
        lambda repl: repl.all_to_all(tf.ones([3, 2]), 0, 1),
        r"cannot cut float32\[3, 2\] into 2 slices of one size along split_axis=0",
        r"with splits=\[\.\.\.\]",
    ),
    "too many splits": (
        lambda repl: repl.all_to_all(tf.ones([3]), 0, 0, [1, 1, 1]),
        r"splits=\[1, 1, 1\]",
        "splits are 2 integers",
    ),
    "negative": (
        lambda repl: repl.all_to_all(tf.ones([3]), 0, 0, [4, -1]),
        r"splits=\[4, -1\]",
        "none below zero",
    ),
    "floats": (
        lambda repl: repl.all_to_all(tf.ones([3]), 0, 0, [1.0, 2.0]),
        r"splits=\[1.0, 2.0\]",
        "integers",
    ),
    "object": (
        lambda repl: repl.all_to_all(tf.ones([3]), 0, 0, object()),
        "splits=<object",
        "integers",
    ),
    "wrong sum": (
        lambda repl: repl.all_to_all(tf.ones([4]), 0, 0, [1, 2]),
        r"splits=\[1, 2\] for float32\[4\]",
        "add up to 4",
    ),
    "slices": (
        lambda repl: repl.all_to_all(tf.IndexedSlices(tf.ones([1]), [0], [3]), 0, 0),
        "cannot cut up IndexedSlices",
        "its values and indices",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, message, fix = BAD[name]
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)all_to_all on replica 0 .*{message}.*at tests.*Fix: .*{fix}",
    ):
        repl.run(lambda: call(repl))


def test_slices_that_cannot_be_joined_are_an_error_with_both_lines() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        splits = [3, 1] if repl.replica_id else [2, 2]
        return repl.all_to_all(tf.ones([4, 5]), 0, 1, splits)

    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)all_to_all sends replica 0 slices that cannot be joined along "
        r"concat_axis=1.*replica 0 .*test_all_to_all.py.*replica 1 .*Fix: .*equally",
    ):
        repl.run(step)


@pytest.mark.parametrize("splits", [None, [1, 2], [2, 2]], ids=str)
def test_sizes_that_turn_out_wrong_are_an_error(splits: Any) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(tf.ones([5, 2]), [None, 2])
        sizes = splits and helpers.opaque(np.array(splits))
        return repl.all_to_all(x, 0, 0, sizes)

    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(step)
