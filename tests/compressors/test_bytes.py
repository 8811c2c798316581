# SPDX-License-Identifier: Apache-2.0
"""The number of bytes sent, by the plan and by TensorFlow between hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers, paper_hosts

FEW = 64  # bytes of numbers for scales and finiteness


def planned(value: Any, compressor: Any, variables: str, wrapped: bool) -> int:
    """Returns the bytes per step in the plan of 2 replicas."""
    # Other algorithms send more, and so do copies: they gather what they collect.
    repl = helpers.make(2, variables=variables, algorithm=None, build="trace")
    with repl.context():
        w = tf.Variable(tf.zeros_like(value))
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.SGD(1.0), compressor=compressor
        )

    def step_fn() -> Any:
        x = tf.cast(w, w.dtype) + value
        if wrapped:
            return optimizer.apply([x], [w])
        return repl.all_reduce(x, "mean", compressor=compressor)

    totals = repl.build(step_fn).plan.totals
    assert totals.per_step.unknown == 0 and totals.per_turn.nbytes == 0
    return totals.per_step.nbytes


def _receivers(variables: str, wrapped: bool) -> int:
    """How many of two replicas need a sum: of a gradient, only those that apply it."""
    return 1 if wrapped and variables == "sharded" else 2


@pytest.mark.battery(5)
@pytest.mark.parametrize("wrapped", [True, False], ids=["optimizer", "all_reduce"])
@pytest.mark.parametrize(
    ("compressor", "variables", "share"),
    [
        ("bf16", "mirrored", 1 / 2),
        ("fp16", "mirrored", 1 / 2),
        ("bf16", "sharded", 1 / 2),
        ("int8", "mirrored", 1 / 4),
        ("int8", "sharded", 1 / 4),
        ("ef(bf16)", "mirrored", 1 / 2),
        ("ef(int8)", "mirrored", 1 / 4),
        ("ef(int8)", "sharded", 1 / 4),
        ("topk(ratio=0.01)", "mirrored", 0.03),
    ],
)
def test_shares_of_the_plain_bytes(
    compressor: str, variables: str, share: float, wrapped: bool
) -> None:
    value = tf.zeros([256, 384])
    plain = planned(value, None, variables, wrapped)
    assert plain == _receivers(variables, wrapped) * 256 * 384 * 4
    small = planned(value, compressor, variables, wrapped)
    assert abs(small - share * plain) <= FEW


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_powersgd_of_a_large_matrix(variables: str, feedback: bool) -> None:
    compressor = "powersgd(rank=4)"
    compressor = f"ef({compressor})" if feedback else compressor
    value = tf.zeros([2048, 2048])
    small = planned(value, compressor, variables, wrapped=True)
    assert small - 2 * 2 * 2048 * 4 * 4 <= FEW
    plain = planned(value, None, variables, wrapped=True)
    receivers = _receivers(variables, wrapped=True)
    assert plain == receivers * 2048 * 2048 * 4 >= receivers * 100 * small


def between_hosts(compressor: Any) -> paper_hosts.Ran:
    """Runs an all_reduce on two hosts with one replica each."""

    def make_step(repl: replicator.Replicator) -> Any:
        return lambda: repl.all_reduce(
            helpers.opaque(np.ones([64, 64], "f")), compressor=compressor
        )

    return paper_hosts.run((0, 1), make_step, variables="mirrored")


@pytest.mark.parametrize(
    "compressor", ["bf16", "int8", "topk", "powersgd", "ef(bf16)", "ef(powersgd)"]
)
def test_between_hosts_what_the_plan_says_is_sent(compressor: str) -> None:
    """And a signal, where replicas write their state once nothing can fail."""
    ran = between_hosts(compressor)
    for ends, count in ran.sent.items():
        assert ran.planned[ends] <= count <= ran.planned[ends] + 1
    assert ran.values[0].tobytes() == ran.values[1].tobytes()


def test_between_hosts_as_many_messages_as_without() -> None:
    assert between_hosts("bf16").sent == between_hosts(None).sent


def test_groups_and_algorithms_are_those_that_are_asked_for() -> None:
    repl = helpers.make(3)
    ends = repl.group([0, 2])

    def step_fn() -> Any:
        x = tf.ones([40, 50]) * (repl.replica_id + 1.0)
        if repl.replica_id in ends:
            x = repl.all_reduce(x, group=ends, compressor="ef(bf16)")
        return repl.all_reduce(x, algorithm="ring", compressor="bf16")

    results = repl.run(step_fn)
    np.testing.assert_allclose(results[0], np.full([40, 50], 10.0), rtol=0.01)
    assert replicator.PerReplica is type(results)
    assert repl.plan[-1].algorithm == "ring"
    assert {row.group for row in repl.plan} == {(0, 2), (0, 1, 2)}
