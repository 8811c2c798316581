# SPDX-License-Identifier: Apache-2.0
"""Rules for treating two replicas' ops and attributes as equivalent."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.equal import counterparts
from replicator.graph.ir.placeholder import Call, Value
from replicator.primitives import table

DEVICES = ("CPU:0", "CPU:1", "CPU:2")


def call(**changes: Any) -> Call:
    """Returns replica 0's call of an all_reduce, with some fields changed."""
    values = (Value("float32", (6, 4)),)
    new_call = Call(
        primitive="all_reduce",
        options={"op": "sum"},
        replica_id=0,
        device="CPU:0",
        group=(0, 1, 2),
        key="0",
        operands=values,
        agreed=values,
        line="step.py:1 in step",
    )
    new_call = dataclasses.replace(new_call, **changes)
    return dataclasses.replace(new_call, facts=table.FACTS[new_call.primitive])


@pytest.mark.parametrize(
    ("one", "two", "third"),
    [
        ("CPU:0", "CPU:1", "CPU:2"),
        ("CPU:0", "CPU:0", "CPU:0"),
        ("", "", ""),
        ("CPU:1", "CPU:0", None),
        ("CPU:0", "CPU:2", None),
    ],
)
def test_places_are_the_replicas_own_or_the_same(
    one: str, two: str, third: str | None
) -> None:
    assert counterparts.place(one, two, DEVICES, 2) == third


def test_calls_differ_by_who_calls_and_no_more() -> None:
    other = call(replica_id=1, device="CPU:1", line="step.py:2 in step")
    assert counterparts.call_difference(call(), other, 3) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group": (0, 1)}, "in the group [0, 1]"),
        ({"primitive": "broadcast", "options": {"root": 2}}, "the root 2"),
        (
            {"primitive": "all_to_all", "options": {"splits": "given"}},
            "sizes of its slices",
        ),
        (
            {"primitive": "reduce_scatter", "options": {"axis": 1}},
            "slices that differ in size",
        ),
    ],
)
def test_calls_that_say_nothing_of_copies(changes: dict[str, Any], said: str) -> None:
    one = call(**changes)
    assert said in counterparts.call_difference(one, one, 3)


def test_even_slices_are_those_of_copies_too() -> None:
    one = call(primitive="reduce_scatter", options={"axis": 0})
    assert counterparts.call_difference(one, one, 3) == ""


def test_calls_that_are_not_the_same() -> None:
    other = call(replica_id=1, options={"op": "mean"})
    assert "not the same options" in counterparts.call_difference(call(), other, 3)


def test_scopes_are_renamed_in_text() -> None:
    with tf.Graph().as_default():
        op = tf.constant(["x (replica_1/x:0) =", "replica_1"]).op
    value = op.node_def.attr["value"]
    renaming = counterparts.Renaming(
        ("replica_1/", "replica_2/"),
        ("/device:CPU:1", "/device:CPU:2"),
        {
            "net/add_1": "replica_2/outside/net/add_1",
            "inputs/Next:1": "inputs/Next_1:0",
        },
    )
    renamed = counterparts.rename(value, renaming)
    assert renamed.tensor.string_val[:] == [b"x (replica_2/x:0) =", b"replica_1"]
    for text, other in {
        b"/device:CPU:1, /device:CPU:10": b"/device:CPU:2, /device:CPU:10",
        b"y (net/add_1:0) = ": b"y (replica_2/outside/net/add_1:0) = ",
        b"net/add_10, a/net/add_1, \xff\x00": b"net/add_10, a/net/add_1, \xff\x00",
        b"inputs/Next:1, inputs/Next:2": b"inputs/Next_1:0, inputs/Next:2",
    }.items():
        assert renaming(text) == other
    assert value.tensor.string_val[0] == b"x (replica_1/x:0) ="


def test_what_nothing_depends_on_is_left_out() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0)
        tf.sin(x)
        y = tf.cos(x)
        printed = tf.raw_ops.PrintV2(input="hello")
        ops = graph.get_operations()
        live = counterparts.live(ops, [y], {})
    assert [op.type for op in live] == ["Const", "Cos", "Const", "PrintV2"]
    assert printed in live
