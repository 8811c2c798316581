# SPDX-License-Identifier: Apache-2.0
"""Tensors that can cross between processes, and those that cannot."""

from __future__ import annotations

import pytest
import tensorflow as tf

import replicator
from replicator.graph.ir.placeholder import Call, PrimitiveFacts, Value
from replicator.graph.lowering import crossing
from replicator.graph.matching.elsewhere import Elsewhere
from replicator.world import World


def _call(*shapes, dtype="float32", primitive="all_reduce", op="sum"):
    values = tuple(Value(dtype, shape) for shape in shapes)
    facts = PrimitiveFacts(reduces_for_all=primitive == "all_reduce")
    where = ("/device:CPU:0", (0, 1), "0")
    return Call(
        primitive, {"op": op}, 0, *where, values, values, "train.py:3", facts=facts
    )


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (_call((2, 3)), True),
        (_call((2, 3), op="mean"), True),
        (_call((2, None)), False),  # TensorFlow needs the size of the sum
        (_call((2,), op="max"), False),
        (_call((2,), dtype="int8"), False),
        (_call((2,), dtype="bfloat16"), True),
        (_call((2,), primitive="reduce"), False),
    ],
)
def test_what_is_added_up_between_processes(call, expected):
    assert crossing.adds_up([call]) is expected
    assert not crossing.adds_up([call, _call((None,))])


@pytest.mark.parametrize("call", [_call((2,), dtype="string"), _call(None)])
def test_what_cannot_cross_is_refused_by_name(call):
    with pytest.raises(
        replicator.ReplicatorError, match=r"(?s)cannot cross.*train\.py:3.*Fix: "
    ):
        crossing.check(call)
    crossing.check(_call((2, None)))


def test_ways_lead_to_other_processes_only_and_have_numbers_of_their_own():
    world = World.divided((0, 0, 1), 0, ["/device:CPU:0", "/device:CPU:1", "x"])
    call = _call((2,))
    elsewhere = Elsewhere(
        world, {"0": {0: call, 2: call}}, {"0": 7}, {(0, 1): 5}, [{}] * 3
    )
    ways = crossing.Ways(elsewhere, 0, (1, 0))
    assert ways.of(Call(**{**call.__dict__, "group": (0, 1)})) is None
    way = ways.of(Call(**{**call.__dict__, "group": (0, 2)}))
    assert (way.processes, way.key, way.group_key) == ((0, 1), 7, 5)
    inside = ways.of_region(call, (0, 2), 0)
    assert inside.key > 7
    with pytest.raises(replicator.ReplicatorError, match="runs twice in a step"):
        ways.of(Call(**{**call.__dict__, "group": (0, 2)}))


def test_gathered_parts_are_whose_the_order_of_gathers_says():
    way = crossing.Crossing((0, 2), 0, "/device:CPU:0", 1, (2, 1, 0), 0)
    parts = way._parts(tf.constant([7, 8, 1, 2]))
    assert {k: part.numpy().tolist() for k, part in parts.items()} == {
        2: [7, 8],
        0: [1, 2],
    }
