# SPDX-License-Identifier: Apache-2.0
"""The table of reductions: extrema and their owners, and meaningless ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from replicator.primitives import reductions
from tests import helpers

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


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("op", NUMPY)
def test_the_extremum_and_the_lowest_replica_that_holds_it(op: str, dtype: str) -> None:
    values = _ties(3, dtype)
    repl = helpers.make(3)

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


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("by", ["tape", "tf.gradients"])
def test_the_gradient_goes_to_the_owner_alone(by: str, mode: str) -> None:
    rows = np.array([[1.0, 5.0, 2.0], [4.0, 5.0, 2.0], [4.0, 0.0, 3.0]])
    repl = helpers.make(3)

    def step() -> Any:
        r = repl.replica_id
        x, n = helpers.opaque(rows[r]), helpers.opaque(r)
        with tf.GradientTape() as tape:
            tape.watch(x)
            # An integer leaf beside them has no gradient and removes none.
            _, (value, owner), (number, _) = repl.all_reduce([n, x, x[0]], "argmax")
            loss = (r + 1.0) * tf.reduce_sum(value * [1.0, 10.0, 100.0]) + number
            loss += tf.reduce_sum(tf.cast(owner, tf.float64))
        return tape.gradient(loss, x) if by == "tape" else tf.gradients(loss, x)[0]

    got = helpers.run(mode, repl, lambda: step)
    np.testing.assert_array_equal(got, [[0, 60, 0], [9, 0, 0], [0, 0, 600]])


def test_second_derivatives_of_an_extremum() -> None:
    rows = np.array([[1.0, 5.0, 2.0], [4.0, 5.0, 2.0], [4.0, 0.0, 3.0]])
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        x = helpers.opaque(rows[repl.replica_id])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(repl.all_reduce(x, "argmax").value ** 3)
            slope = tape.gradient(loss, x)
        return outer.gradient(slope, x)

    # The sum of the slopes is 3 * 3 * value**2, on the owner; the slope of that is 18x.
    np.testing.assert_array_equal(repl.run(step), [[0, 90, 0], [72, 0, 0], [0, 0, 54]])


def test_shapes_that_differ_when_run_are_an_error() -> None:
    repl = helpers.make(2)
    for part in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError):
            repl.run(
                lambda part=part: repl.all_reduce(
                    helpers.opaque(tf.ones([1 + repl.replica_id]), [None]), "argmin"
                )[part]
            )


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_whose_best_is_it(num_replicas: int) -> None:
    """The purpose of MINLOC: the best replica's weights go to all."""
    losses, weights = [0.5, 0.25, 0.25], np.arange(6.0).reshape(3, 2)
    repl = helpers.make(num_replicas)

    def step() -> Any:
        r = repl.replica_id
        best = repl.all_reduce(helpers.opaque(losses[r]), "argmin")
        own = tf.where(best.owner == r, weights[r], 0.0)
        return best, repl.all_reduce(own)

    best, chosen = repl.run(step)
    assert isinstance(best.value, replicator.PerReplica)
    np.testing.assert_array_equal(chosen, [weights[1]] * num_replicas)


# --- Meaningless reductions -----------------------------------------------------------

KINDS = {"floating": "float32", "complex": "complex64", "integer": "int32"}
KINDS["bool"] = "bool"
NONSENSE = [
    (op, KINDS[kind], reduction.fix)
    for op, reduction in reductions.REDUCTIONS.items()
    for kind in KINDS
    if kind not in reduction.kinds
]


@pytest.mark.parametrize(("op", "dtype", "fix"), NONSENSE)
def test_nonsense_is_refused(op: str, dtype: str, fix: str) -> None:
    repl = helpers.make(2)
    with pytest.raises(errors.ArgumentError) as raised:
        repl.run(lambda: repl.all_reduce([1, tf.zeros([2], dtype)][1:], op))
    text = str(raised.value)
    assert f"all_reduce on replica 0 was asked for the {op} of {dtype} tensors" in text
    assert f"Fix: {fix}" in text
    assert "test_reductions.py:" in text


@pytest.mark.parametrize("op", reductions.REDUCTIONS)
def test_only_sums_and_means_are_sparse(op: str) -> None:
    repl = helpers.make(2)
    ones = {"logical": True, "bitwise": 1}.get(op.partition("_")[0], 1.0)

    def step() -> tf.Tensor:
        slices = tf.IndexedSlices(tf.constant([ones]), tf.constant([0]))
        return repl.all_reduce(slices, op).values

    if op in ("sum", "mean"):
        whole = 2.0 if op == "sum" else 1.0  # of equal rows, one remains
        assert [list(rows) for rows in repl.run(step)] == [[whole], [whole]]
    else:
        with pytest.raises(errors.ArgumentError, match=f"the {op} of IndexedSlices"):
            repl.run(step)


@pytest.mark.parametrize("op", ["avg", "ArgMin", None, 3, ["sum"]])
def test_unknown_reductions_are_refused(op: Any) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError,
        match=r"(?s)was given op=.*Fix: op is one of sum, mean, .*, logical_or\.",
    ):
        repl.run(lambda: repl.all_reduce(1.0, op))


def test_a_reduction_on_each_replica_of_its_own() -> None:
    repl = helpers.make(2)
    ops = ["bitwise_and", "bitwise_or"]
    with pytest.raises(
        replicator.MismatchError, match="(?s)not the same op.*bitwise_and.*bitwise_or"
    ):
        repl.run(lambda: repl.all_reduce(1, ops[repl.replica_id]))
