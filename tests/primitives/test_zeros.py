# SPDX-License-Identifier: Apache-2.0
"""Zeros are left out of sums: the same results, and fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import strategy
from replicator.primitives import zeros
from tests import helpers

SIZE = 3000  # more than tf.zeros makes a constant of


def own_numbers(r: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(r).standard_normal(size).astype(np.float32)


def reduced(
    having: tuple[int, ...],
    op: str,
    dtype: tf.DType = tf.float32,
    size: int = SIZE,
    hidden: bool = False,
    **options: Any,
) -> tuple[list[np.ndarray], Any]:
    """Reduces the values of some of three replicas; the others have zeros.

    Args:
        having: The replicas with values.
        op: The reduction.
        dtype: The dtype of all operands.
        size: Their number of elements.
        hidden: Whether the graph does not show that zeros are zeros.
        **options: Of all_reduce.

    Returns:
        The replicas' results, and the plan.
    """
    repl = helpers.make(3)

    def step_fn() -> Any:
        x = tf.zeros([size], dtype)
        if repl.replica_id in having:
            x = tf.cast(
                helpers.opaque(own_numbers(repl.replica_id, size), [size]), dtype
            )
        elif hidden:
            x = helpers.opaque(np.zeros(size, dtype.as_numpy_dtype), [size])
        return repl.all_reduce(x, op, **options)

    step = repl.build(step_fn)
    return [x.numpy() for x in step()], step.plan


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("having", [(0,), (2,), (0, 2), ()])
def test_sums_are_those_with_the_zeros(
    having: tuple[int, ...], op: str, dtype: tf.DType
) -> None:
    actual, _ = reduced(having, op, dtype)
    expected, _ = reduced(having, op, dtype, hidden=True)
    for own, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(own, other)


def test_where_one_replica_has_something_only_that_is_sent() -> None:
    _, plan = reduced((1,), "sum")
    (row,) = plan
    assert row.algorithm == "zeros left out"
    assert row.sent == (0, 2 * 4 * SIZE, 0)  # to each of the others


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_zeros_count_where_they_are_not_added(op: str) -> None:
    actual, plan = reduced((1,), op)
    expected, _ = reduced((1,), op, hidden=True)
    np.testing.assert_array_equal(actual[0], expected[0])
    assert plan[0].algorithm != "zeros left out"


def test_an_algorithm_that_is_named_is_that_which_is_used() -> None:
    _, plan = reduced((1,), "sum", algorithm="ring")
    assert plan[0].algorithm == "ring"


MAKERS: dict[str, tuple[Callable[[], tf.Tensor], bool]] = {
    "small": (lambda: tf.zeros([3]), True),
    "large": (lambda: tf.zeros([SIZE]), True),
    "like another": (
        lambda: tf.zeros_like(helpers.opaque(own_numbers(0), [SIZE])),
        True,
    ),
    "of a raw op": (lambda: tf.raw_ops.ZerosLike(x=tf.range(5)), True),
    "passed on": (lambda: tf.identity(tf.zeros([SIZE])), True),
    "ones": (lambda: tf.ones([SIZE]), False),
    "a small constant": (lambda: tf.constant([0.0, 0.0, 1e-30]), False),
    "not a number": (lambda: tf.constant([np.nan]), False),
    "of unknown shape": (
        lambda: tf.zeros(helpers.opaque(np.int32([3]), [None])),
        False,
    ),
    "read": (lambda: helpers.opaque(np.zeros(3, np.float32), [3]), False),
}


@pytest.mark.parametrize("name", MAKERS)
def test_zeros_are_known_by_the_op_that_makes_them(name: str) -> None:
    make, expected = MAKERS[name]
    results: list[bool] = []

    @tf.function(autograph=False)
    def build() -> None:
        results.append(zeros.is_zeros(make()))

    build.get_concrete_function()
    assert results[0] == expected


class OnReplica(strategy.Builder):
    """Places all variables on one replica."""

    def __init__(self, replica: int) -> None:
        self._replica = replica

    def nodes(self, variables: Any, resources: Any) -> Any:
        for variable in variables:
            where = strategy.PSSynchronizer(resources.devices[self._replica])
            yield strategy.Node(variable.path, where)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("using", [(1,), (1, 2), (0, 2)])
def test_who_does_not_use_a_variable_sends_nothing_to_where_it_is(
    using: tuple[int, ...], op: str
) -> None:
    repl = helpers.make(3, strategy=OnReplica(1))
    with repl.context():
        variable = tf.Variable(own_numbers(0))
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5), op)
        optimizer.build([variable])
    before = variable.numpy()

    def step_fn() -> None:
        with tf.GradientTape() as tape:
            tape.watch(start := tf.constant(0.0))
            loss = start
            if repl.replica_id in using:
                loss = tf.reduce_sum(variable**2) / 2
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    step = repl.build(step_fn)
    step()
    (row,) = step.plan
    # In the plan, the owner sends the result to all, who do not use it.
    assert {link.source for link in row.links} - {1} == set(using) - {1}
    factor = 0.5 * len(using) / (1 if op == "sum" else 3)
    np.testing.assert_allclose(variable, before - factor * before, rtol=1e-6)
