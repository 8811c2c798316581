# SPDX-License-Identifier: Apache-2.0
"""Variables that are read and written beside communication in control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers


def _own_value(value: float) -> tf.Variable:
    """A variable with a different value on each replica."""
    return tf.Variable(
        value,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_moving_average_in_a_loop(mode: str, steps: int) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        average = tf.Variable(0.0)

        def step() -> Any:
            def turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                mean = repl.all_reduce(x, "mean")
                average.assign(0.5 * average + 0.5 * mean)
                return n + 1, 2.0 * x

            x = helpers.opaque(repl.replica_id + 1.0)
            tf.while_loop(lambda n, x: n < 3, turn, [tf.constant(0), x])
            return average.read_value()

        return step

    want = 0.0
    for _ in range(steps):
        for mean in (1.5, 3.0, 6.0):
            want = 0.5 * want + 0.5 * mean
    got = helpers.run(mode, repl, make_step, steps=steps)
    np.testing.assert_allclose(got, [want, want])


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("where", ["loop", "conditional", "function", "switch"])
def test_reads_and_writes_keep_their_order(where: str, mode: str) -> None:
    """Before, inside and after; and from one step to the next."""
    repl = helpers.make(3)

    def make_step() -> Callable[[], Any]:
        variable = _own_value(1.0)

        def grow() -> tf.Tensor:
            variable.assign_add(repl.all_reduce(variable.read_value()))
            return variable.read_value()

        function = tf.function(grow)

        def inside() -> tf.Tensor:
            if where == "conditional":
                return tf.cond(helpers.opaque(True), grow, lambda: -1.0)
            if where == "switch":
                return tf.switch_case(helpers.opaque(1), [lambda: -1.0, grow])
            if where == "function":
                return function()
            return tf.while_loop(
                lambda n, _: n < 1, lambda n, _: (n + 1, grow()), [tf.constant(0), 0.0]
            )[1]

        def step() -> Any:
            before = variable.read_value()
            variable.assign(before + float(repl.replica_id))
            first, second = inside(), inside()
            variable.assign_add(1.0)
            return before, first, second, variable.read_value()

        return step

    got = helpers.run(mode, repl, make_step, steps=2)
    value = np.ones(3)
    for _ in range(2):
        want = [value]
        value = value + np.arange(3.0)
        for _ in range(2):
            value = value + value.sum()
            want.append(value)
        value = value + 1.0
        want.append(value)
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(np.stack(list(one)), two)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_what_nobody_uses_is_written_all_the_same(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        variable = tf.Variable(1.0)

        def step() -> Any:
            before = variable.read_value()

            def write() -> tf.Tensor:
                variable.assign(variable + repl.all_reduce(1.0))
                return before

            tf.cond(helpers.opaque(True), write, lambda: before)
            return before

        return step

    assert list(helpers.run(mode, repl, make_step, steps=3)) == [5.0, 5.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_variable_created_in_a_loop(mode: str) -> None:
    repl = helpers.make(2)
    variables: list[tf.Variable] = []

    def step() -> tf.Tensor:
        def turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            if not variables:
                variables.append(tf.Variable(5.0))
            return n + 1, repl.all_reduce(x * variables[0])

        x = helpers.opaque(repl.replica_id + 1.0)
        return tf.while_loop(lambda n, x: n < 2, turn, [tf.constant(0), x])[1]

    assert list(helpers.run(mode, repl, lambda: step)) == [150.0, 150.0]


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_metric_updated_in_a_loop(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        metric = tf.keras.metrics.Mean()

        def step() -> Any:
            def turn(n: tf.Tensor) -> tuple[tf.Tensor]:
                total = repl.all_reduce(n + repl.replica_id)
                metric.update_state(total * (repl.replica_id + 1))
                return (n + 1,)

            tf.while_loop(lambda n: n < 2, turn, [tf.constant(0)])
            return metric.result()

        return step

    # Totals of 1 and 3, and twice these.
    assert list(helpers.run(mode, repl, make_step)) == [3.0, 3.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_gradients_of_a_variable_read_in_a_loop(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        weight = tf.Variable(2.0)

        def step() -> Any:
            x = helpers.opaque(repl.replica_id + 1.0)
            with tf.GradientTape() as tape:
                y = tf.while_loop(
                    lambda n, y: n < 2,
                    lambda n, y: (n + 1, weight * repl.all_reduce(y)),
                    [tf.constant(0), x],
                )[1]
            return y, tape.gradient(y, weight)

        return step

    # y_r = w * 2 * w * (x0 + x1); the sum of both is 4 w w 3, and replica r's own
    # weight
    # is half of the first factor and half of the second.
    y, d = helpers.run(mode, repl, make_step)
    assert list(y) == [24.0, 24.0]
    assert list(d) == [24.0, 24.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_sparse_gradients_through_a_loop(mode: str) -> None:
    repl = helpers.make(2)
    ids = [[0, 1], [1, 2]]

    def make_step() -> Callable[[], Any]:
        table = tf.Variable(tf.ones([6, 2]))

        def step() -> Any:
            def turn(n: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                rows = tf.gather(table, tf.constant(ids[repl.replica_id]) + n)
                return n + 1, y + repl.all_reduce(tf.reduce_sum(rows)) ** 2

            with tf.GradientTape() as tape:
                y = tf.while_loop(lambda n, y: n < 3, turn, [tf.constant(0), 0.0])[1]
            return y, tf.convert_to_tensor(tape.gradient(y, table))

        return step

    y, d = helpers.run(mode, repl, make_step)
    want = np.zeros([2, 6, 2])
    for r in range(2):
        for n in range(3):
            want[r, np.array(ids[r]) + n] += 2 * 2 * 8  # of both replicas' 8 ** 2
    assert list(y) == [192.0, 192.0]
    np.testing.assert_allclose(np.stack(list(d)), want)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_indexed_slices_all_reduced_in_a_loop(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        table = tf.Variable(tf.ones([4, 2]))

        def step() -> Any:
            def turn(n: tf.Tensor) -> tuple[tf.Tensor]:
                with tf.GradientTape() as tape:
                    ids = [[0, 1], [1, 2]][repl.replica_id]
                    y = tf.reduce_sum(tf.gather(table, ids))
                gradient = repl.all_reduce(tape.gradient(y, table))
                assert isinstance(gradient, tf.IndexedSlices)
                table.assign_sub(tf.convert_to_tensor(gradient))
                return (n + 1,)

            tf.while_loop(lambda n: n < 3, turn, [tf.constant(0)])
            return table.read_value()

        return step

    for replica_values in helpers.run(mode, repl, make_step):
        assert replica_values[:, 0].tolist() == [-2.0, -5.0, -2.0, 1.0]
