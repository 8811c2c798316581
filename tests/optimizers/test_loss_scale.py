# SPDX-License-Identifier: Apache-2.0
"""LossScaleOptimizer: the replicas' common scale, and the steps that it skips."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers
from tests.optimizers import problem

kopt = tf.keras.optimizers


def _make(**options: Any) -> kopt.LossScaleOptimizer:
    options = {"initial_scale": 8.0, "dynamic_growth_steps": 2, **options}
    return kopt.LossScaleOptimizer(kopt.SGD(0.5, momentum=0.5), **options)


def _plain(factors: list[float]) -> list[tuple[float, float, int]]:
    """Minimises f * w with one f per step; returns (w, scale, iterations) of each."""
    w = tf.Variable(1.0)
    optimizer = _make()
    optimizer.build([w])
    seen = []
    for factor in factors:
        gradient = tf.constant(factor) * optimizer.scale_loss(1.0)
        optimizer.apply([gradient], [w])
        seen.append(
            (w.numpy(), optimizer.dynamic_scale.numpy(), optimizer.iterations.numpy())
        )
    return seen


NAN = float("nan")
INF = float("inf")


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("built", [False, True], ids=["built_late", "built_first"])
@pytest.mark.parametrize("bad", [INF, NAN], ids=["inf", "nan"])
def test_non_finite_on_one_replica_skips_the_step_on_all(
    mode: str, built: bool, bad: float
) -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(_make())
        if built:
            optimizer.build([w])
    # Steps as columns, replicas as rows; in step 2 only replica 1 is not finite.
    factors = np.float32([[1, 2, 3, 4, 5], [3, 2, bad, 2, 1]])
    turn = iter(range(5))

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        replica_factors = factors[ctx.replica_id]
        return helpers.untuned(tf.data.Dataset.from_tensor_slices(replica_factors))

    def step_fn(factor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(factor * w)
        optimizer.apply_gradients([(tape.gradient(scaled, w), w)])
        return scaled

    call = repl.build(step_fn, input_fn)
    if mode == "function":
        call = tf.function(lambda: repl.run(step_fn, input_fn))
    expected = _plain([2.0, 2.0, bad, 3.0, 3.0])
    for k in turn:
        call()
        helpers.assert_replicas_equal([w, *optimizer.variables])
        states = (
            w.numpy(),
            optimizer.dynamic_scale.numpy(),
            optimizer.iterations.numpy(),
        )
        assert states == expected[k], k
    assert expected[2][0] == expected[1][0]  # otherwise nothing was tested
    assert [scale for _, scale, _ in expected] == [8, 16, 8, 8, 16]


def test_first_step_scales_by_a_variable_not_a_constant() -> None:
    """A scale changed between steps takes effect, also in the first traced step."""
    repl, optimizer, w = problem.wrapped(_make, 1.0)

    def step_fn() -> tf.Tensor:
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(w)
        optimizer.apply([tape.gradient(scaled, w)], [w])
        return scaled

    np.testing.assert_array_equal(repl.run(step_fn), [8.0, 8.0])
    assert w.numpy() == 0.5
    optimizer.dynamic_scale.assign(32.0)
    np.testing.assert_array_equal(repl.run(step_fn), [16.0, 16.0])  # 0.5 * 32


@pytest.mark.parametrize("mode", helpers.MODES)
def test_first_step_in_which_replica_0_has_no_gradient(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Any:
        w = tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(_make())

        def step_fn() -> tf.Tensor:
            gradient = 4.0 * optimizer.scale_loss(1.0)
            given = gradient if repl.replica_id == 1 else None
            optimizer.apply([given], [w])
            return w.read_value()

        return step_fn

    assert [float(x) for x in helpers.run(mode, repl, make_step)] == [0.0, 0.0]


def test_weight_zero_hides_a_replica_that_is_not_finite() -> None:
    repl, optimizer, w = problem.wrapped(_make, 1.0)

    def step_fn() -> None:
        scale = optimizer.scale_loss(1.0)
        gradient = [1.0, NAN][repl.replica_id] * scale
        optimizer.apply([gradient], [w], weight=[4, 0][repl.replica_id])

    repl.run(step_fn)
    assert optimizer.iterations.numpy() == 1
    assert w.numpy() == 0.5


def test_made_inside_the_step_is_refused() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)

    def step_fn() -> None:
        optimizer = repl.wrap_optimizer(_make())
        optimizer.apply([optimizer.scale_loss(1.0) * w], [w])

    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)LossScaleOptimizer is created again.*test_loss_scale.py:\d+.*Fix: "
        r".*outside step_fn",
    ):
        repl.run(step_fn)
    assert w.numpy() == 1.0


def test_inner_optimizer_wrapped_is_refused() -> None:
    repl = helpers.make(2)
    with repl.context():
        inner = repl.wrap_optimizer(kopt.SGD(0.1))
        outer = kopt.LossScaleOptimizer(inner)
    with pytest.raises(
        replicator.ReplicatorError,
        match="(?s)LossScaleOptimizer is already wrapped.*Fix: .* the outer",
    ):
        repl.wrap_optimizer(outer)
