# SPDX-License-Identifier: Apache-2.0
"""The ops that wait for a barrier, and those that it waits for. Runs nothing."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from replicator.graph.ir import placeholder
from replicator.graph.ir.placeholder import Call
from replicator.graph.lowering import fence
from replicator.graph.matching import control_flow
from replicator.primitives import table


def _call(primitive: str, number: int) -> tf.Operation:
    call = Call(primitive, {}, 0, "CPU:0", (0,), str(number), (), (), "train.py:4")
    call = dataclasses.replace(call, facts=table.FACTS[primitive])
    return placeholder.put(call, [], [])


def _effect(name: str) -> tf.Operation:
    return tf.raw_ops.Assert(condition=True, data=["text"], name=name)


def _waits(graph: tf.Graph) -> dict[str, list[str]]:
    """Adds the fences; returns the control inputs of each op."""
    ops = graph.get_operations()
    initializers = {op for op in ops if op.name.startswith("make")}
    fence.put_up(ops, control_flow.find_sites(ops, 0), initializers)
    waits = {op.name: [o.name for o in op.control_inputs] for op in ops}
    return {name: before for name, before in waits.items() if before}


def test_effects_stand_before_or_behind() -> None:
    with tf.Graph().as_default() as graph:
        _effect("one")
        tf.constant(2.0, name="no_effect")
        _effect("two")
        _call("barrier", 0)
        _effect("three")
        _call("barrier", 1)
        _call("barrier", 2)
        _effect("four")
    assert _waits(graph) == {
        "barrier": ["one", "two"],
        "three": ["barrier"],
        "barrier_1": ["barrier", "three"],
        "barrier_2": ["barrier_1"],
        "four": ["barrier_2"],
    }


def test_initialisers_are_no_part_of_the_step() -> None:
    with tf.Graph().as_default() as graph:
        _effect("make_before")
        _call("barrier", 0)
        _effect("make_behind")
    assert _waits(graph) == {}


def test_other_communication_holds_nothing_up() -> None:
    with tf.Graph().as_default() as graph:
        _effect("before")
        _call("all_reduce", 0)
        _effect("behind")
    assert _waits(graph) == {}


def test_control_flow_with_a_barrier_inside_is_one() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.bool, [], "x")
        _effect("before")
        tf.cond(x, lambda: _call("barrier", 0) and 0, lambda: 1, name="inside")
        _effect("behind")
    assert _waits(graph) == {"inside": ["before"], "behind": ["inside"]}


def test_barriers_become_one_that_waits_for_all() -> None:
    with tf.Graph().as_default() as graph:
        barriers = []
        for r in range(2):
            with tf.name_scope(f"replica_{r}"):
                ops = [_effect("before"), _call("barrier", 0), _effect("behind")]
            fence.put_up(ops, control_flow.find_sites(ops, r), set())
            barriers.append(ops[1])
        fence.join(barriers)
        behind = [graph.get_operation_by_name(f"replica_{r}/behind") for r in range(2)]
    (joint,) = {op for late in behind for op in late.control_inputs}
    assert joint.type == "NoOp"
    names = sorted(op.name for op in joint.control_inputs)
    assert names == ["replica_0/before", "replica_1/before"]
