# SPDX-License-Identifier: Apache-2.0
"""Where predicates are compared; tests/control_flow reads the messages."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator.graph.ir.placeholder import Call
from replicator.graph.lowering import disagreement
from replicator.graph.matching.control_flow import Region
from replicator.graph.same.keys import Keys


def _regions(device: str) -> list[Region]:
    """Two conditionals with a call each, in the default graph."""
    regions = []
    for r in range(2):
        taken = tf.cond(tf.constant(True), lambda: tf.zeros([]), lambda: tf.ones([]))
        while "If" not in taken.op.type:
            taken = taken.op.inputs[0]
        call = Call(
            primitive="all_reduce",
            options={},
            replica_id=r,
            device=device,
            group=(0, 1),
            key="0",
            operands=(),
            agreed=(),
            line="train.py:4 in step",
        )
        regions.append(Region(taken.op, r, (call,)))
    return regions


def test_answers_known_to_be_the_same_are_not_compared() -> None:
    with tf.Graph().as_default() as graph:
        regions = _regions("/device:CPU:0")
        answers = [tf.constant(True), tf.constant(True)]
        before = len(graph.get_operations())
        assert (
            disagreement.agreed(regions, answers, ("no", "yes"), Keys()) is answers[0]
        )
        assert len(graph.get_operations()) == before


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_answers_are_compared_when_it_runs(one: bool, other: bool) -> None:
    with tf.Graph().as_default():
        answers = [tf.compat.v1.placeholder(tf.bool, []) for _ in range(2)]
        regions = _regions("/device:CPU:0")
        result = disagreement.agreed(regions, answers, ("says no", "says yes"), Keys())
        with tf.compat.v1.Session() as session:
            feed = dict(zip(answers, (one, other), strict=True))
            if one == other:
                assert session.run(result, feed) == one
                return
            said = [["says no", "says yes"][answer] for answer in (one, other)]
            with pytest.raises(
                tf.errors.InvalidArgumentError,
                match=rf"\[replica 0 {said[0]}\] \[replica 1 {said[1]}\] \[the "
                r"conditional holds all_reduce at train.py:4 in step\] \[Fix: ",
            ):
                session.run(result, feed)


@pytest.mark.parametrize(
    ("device", "host"),
    [
        ("/job:worker/task:1/device:GPU:3", "/job:worker/task:1/device:CPU:0"),
        ("/job:worker/task:1/device:CPU:3", "/job:worker/task:1/device:CPU:3"),
    ],
)
def test_answers_are_compared_on_a_host(device: str, host: str) -> None:
    """Accelerators have no kernel for an assertion."""
    with tf.Graph().as_default() as graph:
        answers = [tf.compat.v1.placeholder(tf.bool, []) for _ in range(2)]
        regions = _regions(device)
        before = len(graph.get_operations())
        disagreement.agreed(regions, answers, ("no", "yes"), Keys())
        added = graph.get_operations()[before:]
    assert {tf.DeviceSpec.from_string(op.device) for op in added} == {
        tf.DeviceSpec.from_string(host)
    }
