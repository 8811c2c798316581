# SPDX-License-Identifier: Apache-2.0
"""Parts of a step add up to it, divided according to the ops that ran."""

from __future__ import annotations

import pytest

from replicator._tf import profiles
from replicator.profile import parts, traces
from tests.profile import made


def _event(name, start, seconds, plane="/host:CPU", thread=0):
    return profiles.ProfileEvent(plane, thread, name, start, seconds)


_ROWS = (made.row(), made.row("broadcast", number=3))
_EVENTS = [
    _event("replica_0/MatMul:MatMul", 0.0, 4.0),
    _event("replica_1/MatMul:MatMul", 0.0, 2.0, thread=1),
    _event("communicate/all_reduce/0/AddN:AddN", 4.0, 3.0),
    _event("while/body/_4/communicate/broadcast/3_1/Identity:Identity", 7.0, 1.0),
    _event("EagerExecute", 0.0, 9.0),
    _event("ThreadpoolListener::Record", 0.0, 9.0),
]


def test_ops_are_found_with_their_replicas_and_communications():
    ran = traces.ops_of(_EVENTS, _ROWS)
    assert [(op.type, op.replica_id, op.row, op.own_seconds) for op in ran] == [
        ("MatMul", 0, None, 4.0),
        ("MatMul", 1, None, 2.0),
        ("AddN", None, 0, 3.0),
        ("Identity", None, 1, 1.0),
    ]


def test_what_runs_inside_of_an_op_is_counted_once():
    events = [
        _event("while:While", 0.0, 5.0),
        _event("while/body/communicate/all_reduce/0/AddN:AddN", 1.0, 3.0),
        _event("replica_0/Relu:Relu", 5.0, 1.0),
    ]
    ran = traces.ops_of(events, _ROWS)
    assert [op.own_seconds for op in ran] == [2.0, 3.0, 1.0]


def test_ops_that_run_at_once_share_the_time() -> None:
    ran = traces.ops_of(_EVENTS, _ROWS)
    # Both products run until 2; then one of them, the sum, and the ops in the loop.
    assert parts.seconds_by_op(ran) == pytest.approx([3.0, 1.0, 3.0, 1.0])
    assert sum(parts.seconds_by_op(ran)) == pytest.approx(8.0)  # nothing counts twice


def test_of_ops_inside_one_another_the_innermost_runs() -> None:
    events = [
        _event("while:While", 0.0, 6.0),
        _event("while/body/replica_0/Relu:Relu", 1.0, 2.0),
        _event("replica_1/Relu:Relu", 2.0, 2.0, thread=1),
        _event("replica_1/Zero:Zero", 2.0, 0.0, thread=1),
    ]
    ran = traces.ops_of(events, _ROWS)
    took = {
        op.name: took for op, took in zip(ran, parts.seconds_by_op(ran), strict=True)
    }
    assert took == pytest.approx(
        {
            "while": 1 + 0.5 + 2,
            "while/body/replica_0/Relu": 1 + 0.5,
            "replica_1/Relu": 0.5 + 0.5,
            "replica_1/Zero": 0.0,
        }
    )


def test_shares_of_shared_cores_add_up():
    ran = traces.ops_of(_EVENTS, _ROWS)
    actual = parts.split(ran, _ROWS, 16.0, shared=True)
    assert actual.compute == pytest.approx(8.0)
    assert actual.communication == pytest.approx((6.0, 2.0))


def test_what_one_does_for_all_is_told_apart_in_loops_and_sends_too() -> None:
    events = [
        *_EVENTS,
        _event("replica_1/sgd/AssignSub:AssignSubVariableOp", 8.0, 2.0),
        _event("replica_1/sgd/AssignSub/_61:_Send", 10.0, 1.0),
        _event("replica_0/cond/then/_7/replica_0/Mul:Mul", 11.0, 1.0),
        _event("replica_1/sgd_1/AssignSub:AssignSubVariableOp", 12.0, 4.0),
    ]
    once = {"replica_1/sgd/AssignSub", "replica_0/cond", "communicate/all_reduce/0"}
    ran = traces.ops_of(events, _ROWS, once)
    assert [op.once for op in ran] == [False] * 4 + [True] * 3 + [False]
    actual = parts.split(ran, _ROWS, 32.0, shared=True)
    assert actual.once == pytest.approx(8.0)
    assert actual.compute == pytest.approx(16.0)
    assert actual.communication == pytest.approx((6.0, 2.0))
    assert parts.split(ran, _ROWS, 32.0, shared=False).once == 0.0


def test_kernels_of_gpus_count_and_what_starts_them_does_not():
    events = [
        *_EVENTS,
        _event("replica_0/MatMul:MatMul", 0.0, 6.0, "/device:GPU:0"),
        _event("replica_1/MatMul:MatMul", 0.0, 8.0, "/device:GPU:1"),
        _event("communicate/all_reduce/0/Nccl:Nccl", 8.0, 2.0, "/device:GPU:0"),
        _event("communicate/all_reduce/0/Nccl:Nccl", 8.0, 2.0, "/device:GPU:1"),
    ]
    ran = traces.ops_of(events, _ROWS)
    assert {op.plane for op in ran} == {"/device:GPU:0", "/device:GPU:1"}
    actual = parts.split(ran, _ROWS, 5.0, shared=False)
    assert actual.communication == pytest.approx((1.0, 0.0))
    assert actual.compute == pytest.approx(4.0)


def test_a_trace_that_holds_nothing_leaves_all_to_the_replicas():
    for shared in (True, False):
        actual = parts.split([], _ROWS, 3.0, shared)
        assert actual == parts.Parts(3.0, 0.0, (0.0, 0.0))
