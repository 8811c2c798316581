# SPDX-License-Identifier: Apache-2.0
"""all_gather: any dtype, different sizes, any axis, and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers, sampling

DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "complex64", "string"]


def _parts(sizes: Sequence[int], axis: int, dtype: str = "float64") -> list[Any]:
    rng = np.random.RandomState(0)
    parts = []
    for size in sizes:
        shape = [2, 3, 2]
        shape[axis] = size
        value = rng.randint(0, 2, shape)
        parts.append(
            value.astype(bytes)
            if dtype == "string"
            else value.astype(tf.as_dtype(dtype).as_numpy_dtype)
        )
    return parts


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, axis: int | None) -> None:
    parts = _parts([2, 2, 2], 0, dtype)
    repl = helpers.make(3)
    results = repl.run(
        lambda: repl.all_gather(helpers.opaque(parts[repl.replica_id]), axis)
    )
    want = np.stack(parts) if axis is None else np.concatenate(parts, axis)
    for result in results:
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, want)


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("axis", "sizes", "static"),
    sampling.in_turn(
        [0, 1, 2, -1, -2, -3],
        [[2, 0, 3], [0, 0, 1], [0, 0, 0]],
        [(), [None, None, None], None],
    ),
    ids=str,
)
def test_sizes_may_differ_along_the_axis(
    axis: int, sizes: Sequence[int], static: Any
) -> None:
    """And each replica's gradient is the slice that it passed."""
    parts = _parts(sizes, axis)
    whole = np.concatenate(parts, axis)
    repl = helpers.make(3)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        r = repl.replica_id
        x = helpers.opaque(parts[r], static)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_gather(x, axis)
            loss = (r + 1.0) * tf.reduce_sum(y * (whole + 1.0) ** 2)
        return y, tape.gradient(loss, x)

    results, slices = repl.run(step)
    for part, result, own in zip(parts, results, slices, strict=True):
        np.testing.assert_array_equal(result, whole)
        np.testing.assert_array_equal(own, 6 * (part + 1.0) ** 2)


def test_a_gathered_boolean_mask() -> None:
    """Sizes that depend on the data."""
    repl = helpers.make(4)

    def step() -> tf.Tensor:
        x = helpers.opaque(tf.range(5)) + 10 * repl.replica_id
        return repl.all_gather(tf.boolean_mask(x, x % 10 < repl.replica_id), axis=0)

    for result in repl.run(step):
        np.testing.assert_array_equal(result, [10, 20, 21, 30, 31, 32])


@pytest.mark.parametrize("mode", helpers.MODES)
def test_any_nest(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        return repl.all_gather({"b": [repl.replica_id, f"r{repl.replica_id}"], "a": ()})

    result = helpers.run(mode, repl, lambda: step)
    for r in range(2):
        assert list(result["b"][0][r]) == [0, 1]
        assert list(result["b"][1][r]) == [b"r0", b"r1"]


def test_an_empty_nest_comes_back() -> None:
    repl = helpers.make(2)
    assert repl.run(lambda: repl.all_gather([])) == []


@pytest.mark.parametrize(
    ("value", "axis", "fix"),
    [
        (np.ones([1]), 1, "between -1 and 0"),
        (np.ones([1, 1]), -3, "between -2 and 1"),
        (1.0, 0, "a scalar has no axis; use axis=None"),
        ([1.0], True, "Python int or None"),
        ([1.0], 0.0, "Python int or None"),
        ([1.0], "0", "Python int or None"),
    ],
)
def test_an_axis_that_does_not_exist_is_refused(
    value: Any, axis: Any, fix: str
) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)all_gather on replica 0 was given axis=.*at tests.*Fix: .*{fix}",
    ):
        repl.run(lambda: repl.all_gather(value, axis))


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_turns_out_not_to_exist_is_an_error(axis: int) -> None:
    repl = helpers.make(2)
    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(lambda: repl.all_gather(helpers.opaque([[1.0]], None), axis))


def test_slices_are_refused() -> None:
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError, match=r"(?s)cannot join IndexedSlices.*gather its values"
    ):
        repl.run(lambda: repl.all_gather(tf.IndexedSlices(tf.ones([1]), [0], [3])))


@pytest.mark.parametrize(
    ("shapes", "fix"),
    [
        (([1], [2]), "Fix: pass axis=0, along which sizes may differ; or make the"),
        (([3, 1], [3, 2]), "Fix: pass axis=1, along which sizes may differ; or make"),
        (([1, 2], [2, 1]), "Fix: make the calls the same on all replicas."),
        (([1], [1, 1]), "Fix: make the calls the same on all replicas."),
    ],
)
@pytest.mark.parametrize("name", ["all_gather", "gather"])
def test_the_way_out_of_different_sizes_is_an_axis(
    name: str, shapes: Any, fix: str
) -> None:
    repl = helpers.make(2)

    def step() -> None:
        getattr(repl, name)(tf.ones(shapes[repl.replica_id]))

    with pytest.raises(
        errors.MismatchError, match=f"not the same shape.*\n.*\n.*\n{fix}"
    ):
        repl.run(step)
