# SPDX-License-Identifier: Apache-2.0
"""A lowering with state: a sum of coarse numbers, with a residual on each replica.

Error feedback (Seide et al. 2014, 1-bit stochastic gradient descent; Karimireddy et al.
2019, arXiv:1901.09847): the rounding error of a replica's number is added to its next
one. The state is an operand and a result; the caller reads it from a variable, and
assigns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import context
from replicator.graph.ir.placeholder import PrimitiveFacts
from replicator.graph.lowering.matched import Matched
from replicator.primitives import base, rooted, table
from tests import helpers

STEPS = 4
# By step and replica: eighths, which float32 adds up exactly.
INPUTS = np.random.default_rng(0).integers(-40, 40, [STEPS, 2, 3]).astype("f") / 8


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Sends the integer part of each number plus its rest; keeps the new rest."""
    sent, kept = [], []
    for (x, rest), device in zip(matched.operands, matched.devices, strict=True):
        with tf.device(device):
            whole = tf.round(x + rest)
            sent.append(whole)
            kept.append(x + rest - whole)
    with tf.device(matched.hub(0)):
        total = tf.add_n(sent)
    return [[total, rest] for rest in kept]


@pytest.fixture(autouse=True)
def coarse_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the primitive to the table."""
    facts = PrimitiveFacts(algorithm="hub", same_for_all=True)
    monkeypatch.setitem(table.LOWERINGS, "coarse_sum", lower)
    monkeypatch.setitem(table.FACTS, "coarse_sum", facts)
    monkeypatch.setitem(table.DEFAULT_ALGORITHMS, "coarse_sum", facts.algorithm)


def sent_and_kept(x: tf.Tensor, rest: tf.Variable) -> list[tf.Tensor]:
    """Returns the sum of the sent values, and the rest that this replica keeps."""
    operands = [x, rest.read_value()]
    return base.communicate(
        "coarse_sum",
        {},
        operands,
        rooted.values(operands),
        differentiable=False,
        states=1,
    )


def summed(x: tf.Tensor, rest: tf.Variable) -> tf.Tensor:
    """Returns the sum, and registers the kept rest, as a combiner does."""
    total, kept = sent_and_kept(x, rest)
    with context.require("summed").equal_updates("the test"):
        rest.assign(kept)
    return total


def make_rest() -> tf.Variable:
    """Creates the state: one rest per replica, summed when read outside."""
    return tf.Variable(
        tf.zeros([3]),
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def expected() -> tuple[np.ndarray, np.ndarray]:
    """Returns, by NumPy, the sent values of each step, and the final rests."""
    rests, sent = np.zeros([2, 3], "f"), []
    for x in INPUTS:
        whole = np.round(x + rests)
        rests = x + rests - whole
        sent.append(whole.sum(0))
    return np.array(sent), rests


def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(INPUTS[:, ctx.replica_id])


def directly(x: tf.Tensor, rest: tf.Variable) -> tf.Tensor:
    return summed(x, rest)


def in_a_branch(x: tf.Tensor, rest: tf.Variable) -> tf.Tensor:
    due = helpers.opaque(True)
    return tf.cond(due, lambda: summed(x, rest), lambda: tf.zeros_like(x))


def in_a_function(x: tf.Tensor, rest: tf.Variable) -> tf.Tensor:
    return tf.function(lambda: summed(x, rest))()


@pytest.mark.battery(5)
@pytest.mark.parametrize("place", [directly, in_a_branch, in_a_function])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_what_is_sent_and_what_is_kept_is_what_was_given(
    mode: str, place: Callable[..., tf.Tensor]
) -> None:
    made = {}

    def make_step() -> Callable[[tf.Tensor], Any]:
        rest, all_sent = make_rest(), tf.Variable(tf.zeros([3]))
        made["rest"], made["sent"] = rest, all_sent

        def step_fn(x: tf.Tensor) -> Any:
            total = place(x, rest)
            with context.require("the step").equal_updates("the test"):
                all_sent.assign_add(total)  # which is proven to be equal
            return total, tf.identity(rest), tf.identity(all_sent)

        return step_fn

    last, rests, sent = helpers.run(
        mode, helpers.make(2), make_step, input_fn, steps=STEPS
    )
    by_step, kept = expected()
    np.testing.assert_array_equal(last, [by_step[-1]] * 2)
    np.testing.assert_array_equal(rests, kept)
    np.testing.assert_array_equal(sent, [by_step.sum(0)] * 2)
    assert np.abs(kept).max() > 0
    np.testing.assert_array_equal(sent[0] + rests[0] + rests[1], INPUTS.sum((0, 1)))
    if mode != "session":
        np.testing.assert_array_equal(made["rest"], kept.sum(0))
        helpers.assert_replicas_equal([made["sent"]])


def test_several_steps_in_one_call() -> None:
    repl = helpers.make(2)
    with repl.context():
        rest = make_rest()
    sent = repl.run(lambda x: summed(x, rest), input_fn, steps_per_call=STEPS)
    by_step, kept = expected()
    np.testing.assert_array_equal(sent, [by_step] * 2)
    np.testing.assert_array_equal([c.numpy() for c in rest.components], kept)


def test_copies_keep_states_of_their_own() -> None:
    repl = helpers.make(4, build="clone")
    with repl.context():
        rest = make_rest()
    x = replicator.PerReplica(*(tf.fill([3], r / 8 + 0.25) for r in range(4)))
    total = repl.run(lambda x: summed(x, rest), args=[x])
    np.testing.assert_array_equal(total, np.full([4, 3], 1.0))
    rests = [float(component[0]) for component in rest.components]
    assert rests == [0.25, 0.375, -0.5 + 1.0, 0.625 - 1.0]


def test_what_is_kept_is_not_taken_as_equal() -> None:
    """Unlike results: an update by it would let the replicas drift apart."""
    repl = helpers.make(2, variables="mirrored")  # an owner's update would be kept
    with repl.context():
        rest, weights = make_rest(), tf.Variable(tf.zeros([3]))

    def by_variable(x: tf.Tensor) -> None:
        summed(x, rest)
        with context.require("the step").equal_updates("the test"):
            weights.assign_add(rest)

    def directly(x: tf.Tensor) -> None:
        _, kept = sent_and_kept(x, rest)
        with context.require("the step").equal_updates("the test"):
            weights.assign_add(kept)

    for wrong in (by_variable, directly):
        weights.assign(tf.zeros([3]))
        rest.assign(tf.zeros([3]))
        own = replicator.PerReplica(tf.fill([3], 0.125), tf.fill([3], 0.25))
        repl.run(wrong, args=[own])
        # An optimizer's unequal writes are aggregated: the mean.
        helpers.assert_replicas_equal([weights])
        assert float(weights[0]) == pytest.approx(0.1875)


def test_the_state_stays_where_it_is() -> None:
    """Replica 1 sends 12 bytes to the hub, which sends the sum; the rests stay."""
    repl = helpers.make(2)
    with repl.context():
        rest = make_rest()
    repl.run(lambda x: summed(x, rest), input_fn)
    (row,) = repl.plan
    assert row.primitive == "coarse_sum" and row.algorithm == "hub"
    assert row.sent == (12, 12) and row.nbytes == 24
