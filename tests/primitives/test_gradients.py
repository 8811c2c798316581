# SPDX-License-Identifier: Apache-2.0
"""Gradients through communication in the ways users take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("by", ["tape", "tf.gradients"])
def test_replicas_may_use_results_in_different_orders(by: str, mode: str) -> None:
    """The order of use determines the order in which gradients are built."""
    repl = helpers.make(3)

    def step() -> Any:
        x, y = helpers.opaque(1.0), helpers.opaque(2.0)
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            a, b = repl.all_reduce(x), repl.all_reduce(y)
            loss = 3 * a + 7 * b if repl.replica_id == 0 else 7 * b + 3 * a
        if by == "tape":
            return tape.gradient(loss, [x, y])
        return tf.gradients(loss, [x, y])

    dx, dy = helpers.run(mode, repl, lambda: step)
    assert [float(d) for d in dx] == [9.0] * 3
    assert [float(d) for d in dy] == [21.0] * 3


def test_second_derivatives_pair_in_different_orders_too() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        x, y = helpers.opaque(2.0), helpers.opaque(3.0)
        with tf.GradientTape() as outer:
            outer.watch([x, y])
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                a, b = repl.all_reduce(x), repl.all_reduce(y)
                loss = a**3 + b**2 if repl.replica_id == 0 else b**2 + a**3
            dx, dy = tape.gradient(loss, [x, y])
            slope = dx + dy if repl.replica_id == 0 else dy + dx
        return outer.gradient(slope, [x, y])

    # Together the losses are 2 * (a**3 + b**2); each dx is 6 * a**2, each dy 4 * b.
    # The sum of the slopes over the replicas is 12 * a**2 + 8 * b, with a = 4, b = 6.
    ddx, ddy = repl.run(step)
    assert [float(d) for d in ddx] == [96.0, 96.0]
    assert [float(d) for d in ddy] == [8.0, 8.0]


def test_a_gradient_on_some_replicas_only_is_an_error() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x)
        return tape.gradient(y, x) if repl.replica_id else x

    with pytest.raises(
        replicator.MismatchError,
        match=r"(?s)A gradient of communication call 0 of replica 1 has no partner"
        r".*in the gradient, at .*test_gradients.py:\d+ in step.*Fix: ",
    ):
        repl.run(step)


def test_a_persistent_tape_differentiates_twice() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        x = helpers.opaque(1.0 + repl.replica_id)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = repl.all_reduce(x)
            one, two = y**2, (1.0 + repl.replica_id) * y
        return tape.gradient(one, x), tape.gradient(two, x), tape.gradient(one, x)

    for got, want in zip(repl.run(step), [12.0, 3.0, 12.0], strict=True):
        assert [float(d) for d in got] == [want, want]


@pytest.mark.parametrize("together", [False, True], ids=["apart", "one nest"])
def test_a_sum_of_several_communications(together: bool) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque([2.0, 5.0][repl.replica_id])
        with tf.GradientTape() as tape:
            tape.watch(x)
            if together:
                a, b = repl.all_reduce([x, x**2])
            else:
                a, b = repl.all_reduce(x), repl.all_reduce(x**2)
            loss = a + b + repl.broadcast(x) + tf.reduce_sum(repl.all_gather(x))
        return tape.gradient(loss, x)

    # 2 * (1 + 2x + 1), and 2 more for the root of the broadcast.
    assert [float(d) for d in repl.run(step)] == [14.0, 24.0]


@pytest.mark.battery(5)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "prod"])
@pytest.mark.parametrize("by", ["tape", "tf.gradients"])
def test_upstream_gradients_may_be_sparse(by: str, op: str) -> None:
    """tf.gather's gradient is IndexedSlices; repeated rows add up."""
    repl = helpers.make(2)
    rows = [[0, 2, 2], [1, 2, 0]]

    def step(gather: bool) -> tf.Tensor:
        r = repl.replica_id
        x = helpers.opaque(np.random.RandomState(r).rand(4, 2))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x, op)
            if gather:
                picked = tf.gather(y, rows[r])
            else:
                picked = tf.one_hot(rows[r], 4, dtype=tf.float64) @ y
            loss = tf.reduce_sum(picked**2)
        return tape.gradient(loss, x) if by == "tape" else tf.gradients(loss, x)[0]

    sparse = repl.run(lambda: step(True))
    dense = repl.run(lambda: step(False))
    for one, two in zip(sparse, dense, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-14)


@pytest.mark.parametrize("by", ["tape", "tf.gradients"])
@pytest.mark.parametrize("op", ["sum", "min", "prod"])
def test_leaves_that_the_loss_does_not_use_have_gradient_zero(op: str, by: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        xs = [helpers.opaque(2.0 + repl.replica_id) for _ in range(3)]
        with tf.GradientTape() as tape:
            tape.watch(xs)
            y = repl.all_reduce([xs[0], xs[1], tf.constant(1), xs[2]], op)
            loss = y[0] * 1.0 + y[3] * 1.0
        if by == "tape":
            return tape.gradient(loss, xs)
        return tf.gradients(loss, xs)

    used, unused, last = repl.run(step)
    want = {"sum": [2.0, 2.0], "min": [2.0, 0.0], "prod": [6.0, 4.0]}[op]
    assert [float(d) for d in used] == [float(d) for d in last] == want
    assert [float(d) for d in unused] == [0.0, 0.0]


def test_replicas_whose_loss_does_not_use_a_result_count_as_zero() -> None:
    """Here by a factor; without any use, the gradient would be missing on a replica."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = repl.all_reduce(x) ** 2 * float(repl.replica_id)
        return tape.gradient(loss, x)

    assert [float(d) for d in repl.run(step)] == [12.0, 12.0]


def test_stop_gradient() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        x = helpers.opaque(3.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            behind = tf.stop_gradient(repl.all_reduce(x)) * x
            before = repl.all_reduce(tf.stop_gradient(x)) * x
        return tape.gradient(behind, x), tape.gradient(before, x)

    for got in repl.run(step):
        assert [float(d) for d in got] == [6.0, 6.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_custom_gradient_around_a_communication(mode: str) -> None:
    repl = helpers.make(2)

    @tf.custom_gradient
    def reduced(x: tf.Tensor) -> Any:
        y = repl.all_reduce(x)

        def backward(d: tf.Tensor) -> tf.Tensor:
            return repl.all_reduce(d, "max") * 10.0

        return y, backward

    def step() -> Any:
        r = repl.replica_id
        x = helpers.opaque(1.0 + r)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = reduced(x**2)
            loss = (r + 1.0) * y
        return y, tape.gradient(loss, x)

    y, d = helpers.run(mode, repl, lambda: step)
    assert [float(v) for v in y] == [5.0, 5.0]
    assert [float(v) for v in d] == [20.0 * 2.0, 20.0 * 4.0]


def test_custom_gradient_inside_a_communication_hands_on_slices() -> None:
    repl = helpers.make(2)

    @tf.custom_gradient
    def lookup(table: tf.Tensor) -> Any:
        def backward(d: tf.Tensor) -> tf.IndexedSlices:
            return tf.IndexedSlices(d, tf.constant([1]), tf.constant([3, 2]))

        return table[1:2], backward

    def step() -> tf.Tensor:
        table = helpers.opaque(tf.ones([3, 2]))
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(lookup(repl.all_reduce(table)))
        return tf.convert_to_tensor(tape.gradient(loss, table))

    for d in repl.run(step):
        np.testing.assert_array_equal(d, [[0, 0], [2, 2], [0, 0]])


@pytest.mark.parametrize("mode", helpers.MODES)
def test_gradients_by_variables(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Any:
        w = tf.Variable([1.0, 2.0])

        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                y = repl.all_reduce(w * (1.0 + repl.replica_id))
                loss = tf.reduce_sum(y**2)
            return tape.gradient(loss, w)

        return step

    # Each loss is (3w)**2; each component's share of 2 * 18w is by its factor.
    first, second = helpers.run(mode, repl, make_step)
    np.testing.assert_array_equal(first, [12.0, 24.0])
    np.testing.assert_array_equal(second, [24.0, 48.0])


def test_gradients_taken_after_the_build_stop_at_the_step() -> None:
    """They are None, as around a step everywhere else."""
    repl = helpers.make(2)
    with tf.Graph().as_default():
        xs = [helpers.opaque(2.0), helpers.opaque(3.0)]
        ys = repl.run(lambda: repl.all_reduce(xs[repl.replica_id] ** 2, "mean"))
        assert tf.gradients(list(ys), xs) == [None, None]
        with helpers.session() as session:
            assert session.run(ys) == (6.5, 6.5)
