# SPDX-License-Identifier: Apache-2.0
"""gather: the result of all_gather, on the root alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers

DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "complex64", "string"]


@pytest.mark.battery(5)
@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, axis: int | None, root: int) -> None:
    values = np.random.RandomState(0).randint(0, 2, [3, 2, 3])
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        x = helpers.opaque(values[repl.replica_id])
        x = tf.as_string(x) if dtype == "string" else tf.cast(x, dtype)
        result = repl.gather(x, root, axis)
        if repl.replica_id != root:
            assert result is None
            return tf.zeros([], dtype)
        assert result.dtype == dtype
        return result

    result = repl.run(step)[root]
    want = np.stack(values) if axis is None else np.concatenate(values, axis)
    if dtype == "string":
        result = tf.strings.to_number(result)
    np.testing.assert_array_equal(tf.cast(result, tf.int64), want)


@pytest.mark.battery(5)
@pytest.mark.parametrize("static", [(), [None, None], None], ids=str)
@pytest.mark.parametrize("sizes", [[2, 0, 3], [0, 0, 1], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("axis", [0, -1])
def test_sizes_may_differ_along_the_axis(axis: int, sizes: Any, static: Any) -> None:
    """And each replica's gradient is the slice that it passed."""
    rng = np.random.RandomState(0)
    parts = [rng.rand(*([n, 2] if axis == 0 else [2, n])) for n in sizes]
    whole = np.concatenate(parts, axis)
    repl = helpers.make(3)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        r = repl.replica_id
        x = helpers.opaque(parts[r], static)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.gather(x, 1, axis)
            y = tf.zeros([0], tf.float64) if y is None else y
            weights = (whole + 1.0) ** 2 if r == 1 else [1.0]
            loss = repl.linked(tf.reduce_sum(y * weights))
        return y, tape.gradient(loss, x)

    results, slices = repl.run(step)
    np.testing.assert_array_equal(results[1], whole)
    for part, own in zip(parts, slices, strict=True):
        np.testing.assert_array_equal(own, (part + 1.0) ** 2)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_any_nest_and_nothing_on_the_others(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        r = repl.replica_id
        result = repl.gather({"b": [r, f"r{r}"], "a": ()})
        empty = repl.gather([])
        if r:
            assert result is None and empty is None
            return {"b": [tf.constant(-1), tf.constant("")], "a": ()}
        assert empty == []
        return result

    result = helpers.run(mode, repl, lambda: step)
    assert list(result["b"][0][0]) == [0, 1]
    assert list(result["b"][1][0]) == [b"r0", b"r1"]


def test_second_derivatives_of_a_linear_loss_are_zero() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque([2.0, 3.0])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = repl.gather(x, 1, axis=0)
                loss = repl.linked(tf.reduce_sum(tf.zeros([]) if y is None else y))
            slope = repl.linked(tf.reduce_sum(tape.gradient(loss, x)))
        return outer.gradient(slope, x, unconnected_gradients="zero")

    for d in repl.run(step):
        np.testing.assert_array_equal(d, [0.0, 0.0])


BAD = {
    "axis": (lambda repl: repl.gather([1.0], axis="0"), "axis='0'", "int or None"),
    "no such axis": (
        lambda repl: repl.gather(tf.ones([1]), axis=1),
        r"axis=1 for float32\[1\]",
        "between -1 and 0",
    ),
    "scalar": (lambda repl: repl.gather(1.0, axis=0), "axis=0", "use axis=None"),
    "slices": (
        lambda repl: repl.gather(tf.IndexedSlices(tf.ones([1]), [0], [3])),
        "cannot join IndexedSlices",
        "gather its values",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, message, fix = BAD[name]
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)gather on replica 0 .*{message}.*at tests.*Fix: .*{fix}",
    ):
        repl.run(lambda: call(repl))
