# SPDX-License-Identifier: Apache-2.0
"""Parts of a step add up to it, as the ops that ran divide it."""

from __future__ import annotations

import pytest

from replicator import _tf
from replicator.profile import parts, traces
from tests.profile import made


def _event(name, start, seconds, plane="/host:CPU", thread=0):
    return _tf.Traced(plane, thread, name, start, seconds)


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
    assert [(op.type, op.replica_id, op.row, op.own) for op in ran] == [
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
    assert [op.own for op in ran] == [2.0, 3.0, 1.0]


def test_shares_of_shared_cores_add_up():
    ran = traces.ops_of(_EVENTS, _ROWS)
    compute, communication = parts.split(ran, _ROWS, 20.0, shared=True)
    assert compute == pytest.approx(12.0)
    assert communication == pytest.approx((6.0, 2.0))


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
    compute, communication = parts.split(ran, _ROWS, 5.0, shared=False)
    assert communication == pytest.approx((1.0, 0.0))
    assert compute == pytest.approx(4.0)


def test_a_trace_that_holds_nothing_leaves_all_to_the_replicas():
    assert parts.split([], _ROWS, 3.0, shared=True) == (3.0, (0.0, 0.0))
    assert parts.split([], _ROWS, 3.0, shared=False) == (3.0, (0.0, 0.0))
