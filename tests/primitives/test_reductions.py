# SPDX-License-Identifier: Apache-2.0
"""Extrema, and the replicas that own them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.primitives import reductions
from tests import helpers, sampling

NUMPY = {"argmin": (np.min, np.argmin), "argmax": (np.max, np.argmax)}
NUMBERS = ["float16", "bfloat16", "float32", "float64"]
NUMBERS += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]


def _ties(num_replicas: int, dtype: str, shape: tuple[int, ...] = (3, 4)) -> Any:
    """Few different values, so that many are held by several replicas."""
    rng = np.random.RandomState(num_replicas)
    values = rng.randint(0, 3, (num_replicas, *shape))
    return values.astype(tf.as_dtype(dtype).as_numpy_dtype)


def _assert_located(op: str, got: Any, values: Any, ids: Any = None) -> None:
    """Compares all replicas' results with NumPy, the lowest owner first."""
    smallest, place = NUMPY[op]
    owners = place(values.astype(np.float64), 0)
    if ids is not None:
        owners = np.asarray(ids)[owners]
    assert isinstance(got, reductions.Extremum)
    for value, owner in zip(got.value, got.owner, strict=True):
        assert value.dtype == values.dtype
        assert owner.dtype == np.int32
        np.testing.assert_array_equal(value, smallest(values, 0))
        np.testing.assert_array_equal(owner, owners)


@pytest.mark.parametrize(
    ("op", "dtype", "algorithm"),
    sampling.in_turn(list(NUMPY), NUMBERS, [None, "hub", "shuffled", "tree", "ring"]),
)
def test_the_extremum_and_the_lowest_replica_that_holds_it(
    op: str, dtype: str, algorithm: str | None
) -> None:
    values = _ties(3, dtype)
    repl = helpers.make(3, algorithm=algorithm)

    def step() -> Any:
        return repl.all_reduce(helpers.opaque(values[repl.replica_id]), op)

    _assert_located(op, helpers.run("eager", repl, lambda: step), values)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_nests_of_extrema(num_replicas: int, mode: str) -> None:
    """Small leaves share a bucket, large ones and unknown ones are alone."""
    shapes = [(), (4,), (2, 4), (0,), (5, 4), (9000, 4)]
    leaves = [_ties(num_replicas, "float32", shape) for shape in shapes]
    leaves[1] = leaves[1].astype(np.int64)
    repl = helpers.make(num_replicas)

    def step() -> Any:
        operands = [helpers.opaque(leaf[repl.replica_id]) for leaf in leaves]
        operands[4] = helpers.opaque(leaves[4][repl.replica_id], None)
        low = repl.all_reduce({"a": operands[:2], "b": tuple(operands[2:])}, "argmin")
        assert [x.owner.shape for x in (*low["a"], *low["b"])] == [
            x.shape for x in operands
        ]
        return low

    low = helpers.run(mode, repl, lambda: step)
    for got, leaf in zip([*low["a"], *low["b"]], leaves, strict=True):
        _assert_located("argmin", got, leaf)


def test_owners_in_a_group_are_ids_of_replicas() -> None:
    values = _ties(4, "int32")
    repl = helpers.make(4)
    odd, even = [1, 3], [0, 2]

    def step() -> Any:
        x = helpers.opaque(values[repl.replica_id])
        return repl.all_reduce(x, "argmax", group=repl.groups([odd, even]))

    value, owner = helpers.run("eager", repl, lambda: step)
    for ids in (odd, even):
        own = reductions.Extremum([value[r] for r in ids], [owner[r] for r in ids])
        _assert_located("argmax", own, values[ids], ids)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", NUMPY)
def test_the_first_nan_is_the_extremum(op: str, dtype: str) -> None:
    """As for NumPy's argmin and argmax, and for the values of "min" and "max"."""
    rows = [[1.0, 2.0, np.nan], [np.nan, 2.0, np.nan], [np.nan, 2.0, -np.inf]]
    repl = helpers.make(3)

    def step() -> Any:
        x = helpers.opaque(tf.constant(rows[repl.replica_id], dtype))
        return repl.all_reduce(x, op), repl.all_reduce(x, op.removeprefix("arg"))

    (value, owner), plain = helpers.run("eager", repl, lambda: step)
    for r in range(3):
        assert owner[r].tolist() == [1, 0, 0]
        np.testing.assert_array_equal(value[r].astype(float), [np.nan, 2.0, np.nan])
        np.testing.assert_array_equal(*np.stack([plain[r], value[r]]).astype(float))


def test_zeros_of_either_sign_tie() -> None:
    repl = helpers.make(2)
    got = repl.run(lambda: repl.all_reduce([-0.0, 0.0][repl.replica_id], "argmax"))
    assert [int(owner) for owner in got.owner] == [0, 0]
