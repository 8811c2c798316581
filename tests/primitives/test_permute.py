# SPDX-License-Identifier: Apache-2.0
"""permute and shift: results, zeros, and errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers

DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "complex64", "string"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_zeros_for_who_receives_nothing(dtype: str) -> None:
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        x = helpers.opaque([1, repl.replica_id])
        x = tf.as_string(x) if dtype == "string" else tf.cast(x, dtype)
        y = repl.permute(x, [(2, 0), (0, 1)])
        assert y.dtype == dtype and y.shape == [2]
        return y

    first, second, third = repl.run(step)
    if dtype == "string":
        assert list(first.numpy()) == [b"1", b"2"]
        assert list(third.numpy()) == [b"", b""]
        return
    assert tf.cast(first, tf.int32).numpy().tolist() == [1, dtype == "bool" or 2]
    assert tf.cast(second, tf.int32).numpy().tolist() == [1, 0]
    assert tf.cast(third, tf.int32).numpy().tolist() == [0, 0]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_permutation_and_its_inverse(order: Any) -> None:
    repl = helpers.make(3)
    pairs = list(enumerate(order))

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        there = repl.permute(helpers.opaque(repl.replica_id), pairs)
        return there, repl.permute(there, [(d, s) for s, d in pairs])

    there, back = repl.run(step)
    assert [int(there[d]) for d in order] == [0, 1, 2]
    assert [int(x) for x in back] == [0, 1, 2]


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("offset", [0, 1, 2, -1, 7])
def test_shift_goes_around_the_ring(offset: int, mode: str) -> None:
    repl = helpers.make(4)
    nest = helpers.run(
        mode,
        repl,
        lambda: lambda: repl.shift({"x": [helpers.opaque(repl.replica_id)]}, offset),
    )
    np.testing.assert_array_equal(nest["x"][0], np.roll(np.arange(4), offset))


def test_shift_in_a_group() -> None:
    repl = helpers.make(4)
    ring = [0, 2, 3]

    def step() -> tf.Tensor:
        x = helpers.opaque(repl.replica_id)
        return repl.shift(x, group=ring) if repl.replica_id in ring else x

    assert [int(x) for x in repl.run(step)] == [3, 1, 0, 2]


def test_the_gradient_goes_back() -> None:
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        x = helpers.opaque(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = repl.permute((tf.constant(1), x), [(0, 2), (1, 1)])
            loss = (repl.replica_id + 1.0) * y
        return tape.gradient(loss, x)

    assert [float(d) for d in repl.run(step)] == [3.0, 2.0, 0.0]


def test_nothing_to_move() -> None:
    repl = helpers.make(2)
    nothing, zeros = repl.run(lambda: (repl.shift([]), repl.permute(1.0, [])))
    assert nothing == []
    assert [float(x) for x in zeros] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(0, 1), (0, 2)], "in which replica 0 is source twice"),
        ([(0, 1), (2, 1)], "in which replica 1 is destination twice"),
        ([(0, 1, 2)], "which are not pairs"),
        ([0, 1], "which are not pairs"),
        (None, "which are not pairs"),
        ([(0, 3)], "but replica 3 is not in the group"),
        ([(0, 4)], r"destination=4, but there are 4 replicas"),
        ([("0", 1)], r"source='0'"),
        ([(True, 1)], "source=True"),
    ],
)
def test_bad_pairs_are_refused(pairs: Any, said: str) -> None:
    repl = helpers.make(4)

    def step() -> tf.Tensor:
        if repl.replica_id < 3:
            repl.permute(1.0, pairs, group=[0, 1, 2])
        return tf.zeros([])

    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)^permute on replica 0 was given .*{said}.*at tests.*Fix: ",
    ):
        repl.run(step)


@pytest.mark.parametrize("offset", [1.0, None, True, "1"])
def test_a_bad_offset_is_refused(offset: Any) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError,
        match=r"(?s)^shift on replica 0 was given offset=.*at tests.*Fix: .*Python int",
    ):
        repl.run(lambda: repl.shift(1.0, offset))


@pytest.mark.parametrize("call", ["shift", "permute"])
def test_slices_are_refused(call: str) -> None:
    repl = helpers.make(2)
    slices = tf.IndexedSlices(tf.ones([1]), [0], [3])
    argument = 1 if call == "shift" else []
    with pytest.raises(
        errors.ArgumentError, match=rf"(?s)^{call} .*cannot move IndexedSlices.*Fix: "
    ):
        repl.run(lambda: getattr(repl, call)(slices, argument))
