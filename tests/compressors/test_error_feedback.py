# SPDX-License-Identifier: Apache-2.0
"""Error feedback: received values and residuals add up to the given ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import replicator
from replicator import compressors
from tests import helpers
from tests.compressors import laws

INNER = ("bf16", "fp16", "int8", "topk(ratio=0.1)", "powersgd(rank=2)")
STEPS = 4


@given(
    inner=st.sampled_from(
        [
            *INNER,
            "powersgd(rank=1, start_step=2)",
            "powersgd(rank=3, warm_start=False)",
            "topk(ratio=1)",
        ]
    ),
    replicas=st.integers(1, 3),
    variables=st.sampled_from(["mirrored", "sharded"]),
    accumulated=st.sampled_from([1, 1, 2]),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12, deadline=None)
def test_nothing_gets_lost(
    inner: str,
    replicas: int,
    variables: str,
    accumulated: int,
    weighted: bool,
    seed: int,
) -> None:
    gradients = laws.Given.random(
        STEPS, replicas, seed, weighted, steps_per_update=accumulated
    )
    repl = helpers.make(replicas, variables=variables)
    training = laws.Training(repl, gradients, f"ef({inner})")
    training.run()
    training.assert_nothing_lost()
    owed = max(np.abs(training.owed(k)).max() for k in range(len(laws.SHAPES)))
    # A single replica sends nothing, and owes nothing.
    assert (owed > 0) == (replicas > 1 and inner != "topk(ratio=1)")


@pytest.mark.parametrize("inner", ["bf16", "int8", "topk(ratio=0.1)"])
def test_without_it_something_does(inner: str) -> None:
    """The law is one that can fail."""
    training = laws.Training(helpers.make(2), laws.Given.random(STEPS, 2), inner)
    training.run()
    with pytest.raises(AssertionError):
        training.assert_nothing_lost()


@pytest.mark.parametrize("inner", ["bf16", "int8"])
def test_in_a_session(inner: str) -> None:
    """In the other ways to run: tests/programs/training.py."""
    gradients, repl = laws.Given.random(STEPS, 2), helpers.make(2)

    def make() -> Any:
        return tf.compat.v1.train.GradientDescentOptimizer(1.0)

    with tf.Graph().as_default():
        training = laws.Training(repl, gradients, f"ef({inner})", make)

        def step_fn(element: Any) -> Any:
            pairs = zip(element[0], training.variables, strict=True)
            return training.optimizer.apply_gradients(pairs)

        result = repl.run(step_fn, training.input_fn)
        owed = {k: v.read_value() for k, v in training.memory.items()}
        received = [v.read_value() for v in training.variables]
        with helpers.monitored_session() as session:
            for _ in range(STEPS):
                session.run(result)
            received, owed = session.run([received, owed])
    for k, expected in enumerate(gradients.sums()):
        rest = owed[f"residual_{k}"].sum(0) if f"residual_{k}" in owed else 0
        np.testing.assert_allclose(rest - received[k], expected, atol=2e-6)


@pytest.mark.parametrize("inner", ["fp16", "topk(ratio=0.1)", "powersgd(rank=2)"])
def test_what_is_no_number_is_not_owed(inner: str) -> None:
    """A useless update leaves the residuals unchanged, on all replicas."""
    values = laws.Given.random(STEPS, 2)
    values.gradients[0][2, 1, 3, 3] = np.inf
    values.gradients[0][2, 0, 3, 4] = np.nan
    training = laws.Training(helpers.make(2), values, f"ef({inner})")
    step = training.repl.build(training.step_fn, training.input_fn)
    step()
    step()
    before = [training.owed(k) for k in range(len(laws.SHAPES))]
    received = [training.received(k) for k in range(len(laws.SHAPES))]
    step()  # not finite
    assert not np.isfinite(training.received(0)).all()
    for k, owed in enumerate(before):
        np.testing.assert_array_equal(training.owed(k), owed)
    for variable, value in zip(training.variables, received, strict=True):
        variable.assign(-value)
    step()
    skipped = laws.Given(
        tuple(np.delete(gradient, 2, 0) for gradient in values.gradients)
    )
    training.given = skipped
    training.assert_nothing_lost()


@pytest.mark.parametrize("inner", INNER)
def test_a_step_with_the_largest_numbers_spoils_no_other(inner: str) -> None:
    """Products of them exceed float32's range; the residuals do not."""
    values = laws.Given.random(STEPS, 2)
    values.gradients[0][1] = np.finfo("f").max
    training = laws.Training(helpers.make(2), values, f"ef({inner})")
    step = training.repl.build(training.step_fn, training.input_fn)
    for _ in range(STEPS):
        for variable in training.variables:
            variable.assign(tf.zeros_like(variable))
        step()
        for k in range(len(laws.SHAPES)):
            assert np.isfinite(training.owed(k)).all()
    assert np.isfinite(training.received(0)).all()


def test_what_a_replica_of_no_weight_has_does_not_count() -> None:
    values = laws.Given.random(STEPS, 2, weighted=True)
    values.weights[1:, 1] = 0
    spoilt = tuple(gradient.copy() for gradient in values.gradients)
    for gradient in spoilt:
        gradient[1:, 1] = np.nan
    training = laws.Training(
        helpers.make(2), laws.Given(spoilt, values.weights), "ef(bf16)"
    )
    training.run()
    training.given = values
    training.assert_nothing_lost()


def test_a_loss_scale_may_change_while_something_is_owed() -> None:
    """Residuals are stored unscaled; a step that overflows adds nothing."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal([9, 2, 30]).astype("f")
    values[4, 1, 7] = np.inf  # halves the scale
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(tf.zeros([30]))
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.LossScaleOptimizer(
                tf.keras.optimizers.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=2
            ),
            compressor="ef(topk(ratio=0.1))",
        )

    def step_fn(value: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(w * value))
        optimizer.apply(tape.gradient(loss, [w]), [w])

    scales = []
    for own in values:
        repl.run(step_fn, args=[replicator.PerReplica(*map(tf.constant, own))])
        scales.append(float(optimizer.dynamic_scale))
    assert scales == [8, 16, 16, 32, 16, 16, 32, 32, 64]
    owed = next(v for v in optimizer._replicator_combiner.compression.memory.variables)
    given_ = np.delete(values, 4, 0).mean(1).sum(0)
    actual = owed.read_value().numpy().sum(0) - w.numpy()
    np.testing.assert_allclose(actual, given_, atol=2e-6)
    assert np.abs(owed.numpy()).max() > 0.1


def test_numbers_beyond_half_precision_are_sent_bit_by_bit() -> None:
    """65504 is the largest; the remainder stays in the residual."""
    values = laws.Given((np.full([3, 2, 1], 3.0e5, "f"),))
    values.gradients[0][1:] = 0
    training = laws.Training(helpers.make(2), values, "ef(fp16)")
    sent = []
    step = training.repl.build(training.step_fn, training.input_fn)
    for _ in range(3):
        step()
        sent.append(float(training.received(0)[0]))
    assert sent == [65504.0, 131008.0, 196512.0]
    training.assert_nothing_lost()


def test_feedback_of_a_users_own() -> None:
    class Sign(compressors.Compressor):
        def compress(self, tensor: tf.Tensor) -> Any:
            return tensor > 0, tf.reduce_mean(tf.abs(tensor))

        def decompress(self, payload: Any, shape: tf.Tensor) -> tf.Tensor:
            positive, size = payload
            return tf.where(positive, size, -size)

    training = laws.Training(
        helpers.make(3), laws.Given.random(5, 3), compressors.ErrorFeedback(Sign())
    )
    training.run()
    training.assert_nothing_lost()
