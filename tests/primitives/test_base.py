# SPDX-License-Identifier: Apache-2.0
"""Rules of all primitives: valid operands, and mismatches by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.primitives import arithmetic
from tests import helpers

OPERANDS = {
    "int": lambda: 3,
    "float": lambda: 3.0,
    "numpy": lambda: np.float32(3),
    "array": lambda: np.array([3.0, 3.0]),
    "list": lambda: tf.convert_to_tensor([3.0]),
}


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("mode", helpers.MODES)
def test_numbers_and_arrays(name: str, mode: str) -> None:
    repl = helpers.make(2)
    for y in helpers.run(mode, repl, lambda: lambda: repl.all_reduce(OPERANDS[name]())):
        np.testing.assert_array_equal(y, 2 * np.asarray(OPERANDS[name]()))


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("size", [1, 1000])
def test_captured_eager_tensors(size: int, mode: str) -> None:
    repl = helpers.make(2)
    constant = tf.range(size)
    for y in helpers.run(mode, repl, lambda: lambda: repl.all_reduce(constant)):
        np.testing.assert_array_equal(y, 2 * np.arange(size))


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather"])
def test_variables(name: str, mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        variable = tf.Variable([1.0, 2.0])
        return lambda: getattr(repl, name)(variable)

    want = {"all_reduce": [2.0, 4.0], "broadcast": [1.0, 2.0]}
    for y in helpers.run(mode, repl, make_step):
        np.testing.assert_array_equal(y, want.get(name, [[1.0, 2.0]] * 2))


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_result_that_nobody_uses(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        repl.all_reduce(helpers.opaque(1.0))
        repl.broadcast(helpers.opaque([1.0], None))
        return repl.all_gather(repl.replica_id)

    for y in helpers.run(mode, repl, lambda: step):
        np.testing.assert_array_equal(y, [0, 1])


def test_results_lie_on_the_devices_of_their_replicas() -> None:
    repl = helpers.make(3)

    def step() -> Any:
        x = helpers.opaque(1.0)
        return repl.all_reduce(x), repl.broadcast(x, 1), repl.all_gather(x)

    with tf.Graph().as_default():
        for column in repl.run(step):
            assert tuple(y.device for y in column) == repl.devices


def _x() -> np.ndarray:
    return np.ones(3, np.float32)


PROGRAMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "primitive": (
        lambda repl: repl.all_reduce(_x()),
        lambda repl: repl.broadcast(_x()),
        "not the same primitive",
    ),
    "order": (
        lambda repl: (
            repl.all_reduce(_x()),
            repl.all_gather(_x()),
        )[0],
        lambda repl: (
            repl.all_gather(_x()),
            repl.all_reduce(_x()),
        )[1],
        "not the same primitive",
    ),
    "op": (
        lambda repl: repl.all_reduce(_x(), "sum"),
        lambda repl: repl.all_reduce(_x(), "max"),
        "not the same op",
    ),
    "root": (
        lambda repl: repl.broadcast(_x(), 0),
        lambda repl: repl.broadcast(_x(), 1),
        "not the same root",
    ),
    "axis": (
        lambda repl: repl.all_gather(_x(), 0),
        lambda repl: repl.all_gather(_x(), -1),
        "not the same axis",
    ),
    "dtype": (
        lambda repl: repl.all_reduce(_x()),
        lambda repl: repl.all_reduce(tf.cast(_x(), tf.float64)),
        r"not the same dtype \(float32\[3\] and float64\[3\]\)",
    ),
    "shape": (
        lambda repl: repl.all_reduce(_x()),
        lambda repl: repl.all_reduce(tf.zeros([1])),
        r"not the same shape \(float32\[3\] and float32\[1\]\)",
    ),
    "rows": (
        lambda repl: repl.all_gather(tf.zeros([2, 3]), 0),
        lambda repl: repl.all_gather(tf.zeros([2, 1]), 0),
        r"not the same shape \(float32\[\?, 3\] and float32\[\?, 1\]\)",
    ),
    "tensors": (
        lambda repl: repl.all_reduce([_x(), _x()])[0],
        lambda repl: repl.all_reduce(_x()),
        "not the same number of tensors",
    ),
    "weight": (
        lambda repl: repl.all_reduce(_x(), "mean"),
        lambda repl: repl.all_reduce(_x(), "mean", weight=1),
        "not the same op",
    ),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_differ_name_both_lines(name: str, mode: str) -> None:
    one, two, message = PROGRAMS[name]
    repl = helpers.make(3)

    def step() -> Any:
        if repl.replica_id < 2:
            return one(repl)
        return two(repl)

    line = r"at tests.primitives.test_base\.py:\d+ in "
    with pytest.raises(
        replicator.MismatchError,
        match=rf"(?s)Communication call 0 differs between replicas: {message}.*"
        rf"replica 0 \(.*CPU:0\): .*{line}.*replica 2 \(.*CPU:2\): .*{line}.*Fix: ",
    ):
        helpers.run(mode, repl, lambda: step)
    after = helpers.run(mode, repl, lambda: lambda: repl.all_reduce(tf.constant(2.0)))
    assert [float(y) for y in after] == [6.0] * 3


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("more", [0, 1])
def test_a_call_on_one_replica_only_is_named(more: int, mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        y = repl.all_reduce(1.0)
        if repl.replica_id == more:
            y = repl.broadcast(y)
        return y

    with pytest.raises(
        replicator.MismatchError,
        match=rf"(?s)Communication call 1 of replica {more} has no partner: broadcast "
        r"root=0 float32\[\] at tests.primitives.test_base\.py:\d+ in step"
        r".*all_reduce.*test_base\.py:\d+ in step.*Fix: .*same calls",
    ):
        helpers.run(mode, repl, lambda: step)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_function_called_twice_has_two_gradients_whatever_their_order(
    mode: str,
) -> None:
    repl = helpers.make(2)

    @tf.function
    def total(x: tf.Tensor) -> tf.Tensor:
        return repl.all_reduce(x)

    def step() -> list[tf.Tensor]:
        x, y = tf.constant(1.0), tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            a, b = total(x), total(y)
            # Replica 1 builds the gradients in the other order.
            loss = 3 * a + 7 * b if repl.replica_id == 0 else 7 * b + 3 * a
        return tape.gradient(loss, [x, y])

    dx, dy = helpers.run(mode, repl, lambda: step)
    assert [float(d) for d in (*dx, *dy)] == [6.0, 6.0, 14.0, 14.0]


@pytest.mark.battery(5)
@pytest.mark.parametrize("count", [1, 2, 3, 9, 17])
@pytest.mark.parametrize("inside", [False, True])
def test_a_sum_in_order_is_differentiated(count: int, inside: bool) -> None:
    """As map_reduce needs it, which sums on one replica what a tape has recorded."""

    @tf.function
    def function(xs: list[tf.Tensor]) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(xs)
            with tf.GradientTape() as tape:
                tape.watch(xs)
                column = [x * x for x in xs]
                total = arithmetic.add_in_order(column)
                if inside:
                    total = tf.cond(
                        total > 0.0,
                        lambda: arithmetic.add_in_order(column),
                        lambda: total,
                    )
            first = tape.gradient(total, xs)
        return total, first, outer.gradient(first, xs)

    xs = [tf.constant(1.0 + k) for k in range(count)]
    total, first, second = function(xs)
    assert float(total) == sum((1.0 + k) ** 2 for k in range(count))
    assert [float(d) for d in first] == [2.0 * (1.0 + k) for k in range(count)]
    assert [float(d) for d in second] == [2.0] * count
