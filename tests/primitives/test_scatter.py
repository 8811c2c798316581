# SPDX-License-Identifier: Apache-2.0
"""scatter: entries or slices of the root's value, by specs or tensors like it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers, sampling

DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "complex64", "string"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    values = np.random.RandomState(0).randint(0, 2, [3, 2, 4])
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        x = helpers.opaque(values)
        x = tf.as_string(x) if dtype == "string" else tf.cast(x, dtype)
        spec = tf.TensorSpec([3, 2, 4], dtype)
        y = repl.scatter(x if repl.replica_id == 1 else spec, root=1)
        assert y.dtype == dtype and y.shape == [2, 4]
        return tf.strings.to_number(y) if dtype == "string" else tf.cast(y, tf.int64)

    for r, result in enumerate(repl.run(step)):
        np.testing.assert_array_equal(result, values[r])


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("size", "sizes", "mode"),
    sampling.in_turn(
        [(7, 0), (7, -1), (2, 0), (0, 1)], [(), [None, None], None], helpers.MODES
    ),
    ids=str,
)
def test_the_first_ones_receive_one_row_more(
    size: tuple[int, int], sizes: Any, mode: str
) -> None:
    """As in NumPy's array_split; some receive none if there are few."""
    (rows, axis), shape = size, [5, 5]
    shape[axis] = rows
    values = np.random.RandomState(0).rand(*shape)
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        if repl.replica_id == 0:
            y = repl.scatter(helpers.opaque(values, sizes), axis=axis)
        else:
            static = shape if sizes == () else sizes
            y = repl.scatter(tf.TensorSpec(static, tf.float64), axis=axis)
        if sizes == ():
            assert y.shape.is_fully_defined()
        return y

    want = np.array_split(values, 3, axis)
    for result, own in zip(helpers.run(mode, repl, lambda: step), want, strict=True):
        np.testing.assert_array_equal(result, own)


def test_gathering_what_was_scattered_gives_it_back() -> None:
    repl = helpers.make(4)
    values = np.arange(10.0).reshape([5, 2])

    def step() -> tf.Tensor:
        r = repl.replica_id
        share = repl.scatter(
            values if r == 2 else tf.TensorSpec([5, 2], tf.float64), 2, 0
        )
        whole = repl.gather(share, 3, axis=0)
        return tf.zeros([]) if whole is None else whole

    np.testing.assert_array_equal(repl.run(step)[3], values)


def test_any_nest() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        if repl.replica_id:
            specs = [tf.TensorSpec([2], tf.int32), tf.TensorSpec([None], tf.string)]
            return repl.scatter({"b": specs, "a": ()})
        return repl.scatter({"b": [[3, 4], ["x", "y"]], "a": ()})

    # A list of numbers is a nest of scalars, which have no entries.
    with pytest.raises(errors.ArgumentError, match=r"int32\[\] for 2 replicas"):
        repl.run(step)

    def with_tensors() -> Any:
        numbers, names = tf.constant([3, 4]), tf.constant(["x", "y"])
        if repl.replica_id:
            numbers, names = map(tf.TensorSpec.from_tensor, (numbers, names))
        return repl.scatter({"b": [numbers, names], "a": ()})

    result = repl.run(with_tensors)
    assert [int(x) for x in result["b"][0]] == [3, 4]
    assert [bytes(x.numpy()) for x in result["b"][1]] == [b"x", b"y"]
    assert repl.run(lambda: repl.scatter([])) == []


def test_only_leaves_of_numbers_are_differentiated() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque([2.0, 3.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            n, y = repl.scatter((tf.constant([3, 5]), x), root=1)
            loss = y * tf.cast(n, tf.float32)
        return tape.gradient(loss, x)

    first, second = repl.run(step)
    np.testing.assert_array_equal(first, [0.0, 0.0])
    np.testing.assert_array_equal(second, [3.0, 5.0])


BAD = {
    "no entry for each": (
        lambda repl: repl.scatter(tf.ones([3, 2])),
        r"float32\[3, 2\] for 2 replicas",
        r"\[2, \.\.\.\]: one entry per replica",
    ),
    "scalar": (lambda repl: repl.scatter(1.0), r"float32\[\] for 2", "one entry per"),
    "scalar with axis": (
        lambda repl: repl.scatter(1.0, axis=0),
        r"axis=0 for float32\[\]",
        "use axis=None",
    ),
    "no such axis": (
        lambda repl: repl.scatter(tf.ones([2]), axis=-2),
        "axis=-2",
        "between -1 and 0, or is None",
    ),
    "axis": (lambda repl: repl.scatter(tf.ones([2]), axis=True), "axis=True", "int or"),
    "slices": (
        lambda repl: repl.scatter(tf.IndexedSlices(tf.ones([1]), [0], [3])),
        "cannot send IndexedSlices",
        "scatter its values",
    ),
    "spec on the root": (
        lambda repl: repl.scatter(tf.TensorSpec([2])),
        r"TensorSpec\(shape=\(2,\).*but it is the root",
        "the root passes tensors",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, message, fix = BAD[name]
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)scatter on replica 0 .*{message}.*at tests.*Fix: .*{fix}",
    ):
        repl.run(lambda: call(repl))


def test_a_size_that_turns_out_wrong_is_an_error() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        return repl.scatter(helpers.opaque(tf.ones([3, 2]), [None, 2]))

    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(step)


def test_second_derivatives_where_nothing_but_zeros_comes_back() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque([3.0, 2.0])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = repl.scatter(x) ** 3
            d = tape.gradient(loss, x)
        return outer.gradient(d, x)

    np.testing.assert_allclose(repl.run(step), [[18.0, 12.0], [0.0, 0.0]])
