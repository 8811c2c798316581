# SPDX-License-Identifier: Apache-2.0
"""reduce_scatter: slices of all_reduce's result; and the dual of all_gather."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.primitives.reductions import REDUCTIONS
from tests import helpers, sampling

R = 3
SIZES = [2, 0, 3]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_each_replica_receives_its_slice_of_the_sum(axis: int) -> None:
    repl = helpers.make(R)
    shape = [4, 4]
    shape[axis] = sum(SIZES)
    values = np.random.default_rng(0).standard_normal([R, *shape]).astype(np.float32)

    def step() -> tf.Tensor:
        own = list(shape)
        own[axis] = SIZES[repl.replica_id]
        x = helpers.opaque(tf.zeros(own))
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = repl.all_gather(x, axis)
            product = tf.reduce_sum(gathered * tf.gather(values, repl.replica_id))
        return tape.gradient(product, x)

    total = helpers.added_up(repl, values)
    expected = np.split(total, np.cumsum(SIZES)[:-1], axis)
    for piece, slice_ in zip(repl.run(step), expected, strict=True):
        np.testing.assert_array_equal(piece, slice_)


def test_gathering_is_its_gradient_and_the_other_way_round() -> None:
    """<all_gather(x), y> summed over replicas is <x, reduce_scatter(y)>."""
    repl = helpers.make(R)
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal([size, 2]).astype(np.float32) for size in SIZES]
    ys = rng.standard_normal([R, sum(SIZES), 2]).astype(np.float32)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        x = helpers.opaque(tf.constant(xs[repl.replica_id]))
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = repl.all_gather(x, axis=0)
            product = tf.reduce_sum(gathered * ys[repl.replica_id])
        back = tape.gradient(product, x)
        return product, tf.reduce_sum(back * x)

    products, duals = repl.run(step)
    np.testing.assert_allclose(np.sum(products), np.sum(duals), rtol=1e-5)


DTYPES = {"floating": "bfloat16", "complex": "complex64", "integer": "uint8"}
DTYPES["bool"] = "bool"
PAIRS = [(op, kind) for op in REDUCTIONS for kind in REDUCTIONS[op].kinds]


@pytest.mark.battery(5)
@pytest.mark.parametrize(("op", "kind"), PAIRS)
def test_gathering_the_slices_gives_the_bits_of_all_reduce(op: str, kind: str) -> None:
    numbers = np.random.RandomState(3).uniform(0, 3, [R, 5, 2])
    values = numbers > 1 if kind == "bool" else numbers
    repl = helpers.make(R, algorithm="hub")

    def step() -> tuple[Any, Any]:
        x = helpers.opaque(tf.cast(values[repl.replica_id], DTYPES[kind]))
        slice_ = repl.reduce_scatter({"x": x}, op)["x"]
        return repl.all_gather(slice_, axis=0), repl.all_reduce(x, op)

    slices, wholes = (tf.nest.flatten(result) for result in repl.run(step))
    for one, two in zip(slices, wholes, strict=True):
        assert one.dtype == two.dtype
        assert one.numpy().tobytes() == two.numpy().tobytes()


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("size", "static", "mode"),
    sampling.in_turn(
        [(7, 0), (7, -1), (2, 0), (0, 1)], [(), [None, None], None], helpers.MODES
    ),
    ids=str,
)
def test_the_first_ones_receive_one_row_more(
    size: tuple[int, int], static: Any, mode: str
) -> None:
    """As in NumPy's array_split; some receive none if there are few."""
    (rows, axis), shape = size, [5, 5]
    shape[axis] = rows
    values = np.random.RandomState(0).rand(R, *shape)
    repl = helpers.make(R)

    def step() -> tf.Tensor:
        x = helpers.opaque(values[repl.replica_id], static)
        y = repl.reduce_scatter(x, "max", axis)
        assert y.shape.is_fully_defined() == (static == ())
        return y

    want = np.array_split(values.max(0), R, axis)
    for result, own in zip(helpers.run(mode, repl, lambda: step), want, strict=True):
        np.testing.assert_array_equal(result, own)


def test_an_empty_nest_comes_back() -> None:
    repl = helpers.make(2)
    assert repl.run(lambda: repl.reduce_scatter([])) == []


BAD = {
    "op": (lambda repl: repl.reduce_scatter([1.0], "avg"), "op='avg'", "op is one of"),
    "dtype": (
        lambda repl: repl.reduce_scatter(tf.constant([1]), "mean"),
        "the mean of int32 tensors",
        "cast to a float",
    ),
    "scalar": (
        lambda repl: repl.reduce_scatter(1.0),
        r"axis=0 for float32\[\]",
        "a scalar has no axis",
    ),
    "no such axis": (
        lambda repl: repl.reduce_scatter(tf.ones([2]), axis=1),
        "axis=1",
        "between -1 and 0",
    ),
    "axis": (
        lambda repl: repl.reduce_scatter(tf.ones([2]), axis=None),
        "axis=None",
        "axis is a Python int",
    ),
    "slices": (
        lambda repl: repl.reduce_scatter(tf.IndexedSlices(tf.ones([1]), [0], [3])),
        "cannot cut up IndexedSlices",
        "all_reduce them",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, message, fix = BAD[name]
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)reduce_scatter on replica 0 .*{message}.*at tests.*Fix: .*{fix}",
    ):
        repl.run(lambda: call(repl))
