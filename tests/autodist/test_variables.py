# SPDX-License-Identifier: Apache-2.0
"""Variables of a program for one device are where a strategy has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from replicator import strategy
from replicator.strategy import Resources, VariableFacts
from tests.autodist import helpers, programs
from tests.autodist.helpers import scope
from tests.autodist.sessions import EACH

v1 = tf.compat.v1
PARTS = strategy.PartitionedPS()


def _made(session: Any) -> dict[str, Any]:
    """Returns the library's variables, by the user's names."""
    return {op.name: v for op, v in session._steps._variables.made.items()}


def _session(program: Any, optimizer: str, plan: Any, replicas: int) -> Any:
    """Returns a session that has run a step."""
    with scope(replicas, plan) as autodist:
        built = program(programs.OPTIMIZERS[optimizer]())
        session = autodist.create_distributed_session()
        session.run(built.fetches, built.feeds(6))
    return session


def _pieces(session: Any) -> Iterator[tuple[str, Any]]:
    """Yields all variables, and the parts of those in parts, with their names."""
    for name, variable in _made(session).items():
        parts = getattr(variable, "parts", None)
        if parts is None:
            yield name, variable
        else:
            yield from ((f"{name}/part_{k}", part) for k, part in enumerate(parts))


def _places(session: Any) -> dict[str, list[int]]:
    """Returns the devices of the components of all variables, by their names."""
    devices = {}
    for name, one in _pieces(session):
        owned = one.placement.owner is not None
        components = one.components[:1] if owned else one.components
        specs = [tf.DeviceSpec.from_string(c.device) for c in components]
        devices[name] = [spec.device_index for spec in specs]
    return devices


# --- What is made ---------------------------------------------------------------------


def test_which_variables_are_references() -> None:
    asked = [({}, False), ({"use_resource": True}, False), ({"use_resource": False}, 1)]
    enabled = v1.resource_variables_enabled()
    with scope() as autodist:
        made = [v1.get_variable(f"w{k}", [], **how) for k, (how, _) in enumerate(asked)]
        made += [v1.Variable(1.0, **how) for how, _ in asked]
        assert [v.is_by_reference for v in made] == [is_so for _, is_so in asked] * 2
        assert {v.op.type for v in made} == {"VarHandleOp"}
        v1.disable_resource_variables()
        try:
            more = v1.get_variable("a", []), v1.get_variable("b", [], use_resource=True)
            assert [v.is_by_reference for v in more] == [True, False]
            assert not tf.Variable(1.0).is_by_reference  # of TensorFlow 2
        finally:
            if enabled:
                v1.enable_resource_variables()
        assert autodist.create_distributed_session().run(made[3:]) == [1, 1, 1]


@pytest.mark.parametrize("plan", EACH, ids=str)
def test_initial_values_of_constants_and_random_numbers_need_no_step(plan: Any) -> None:
    """A step for them took a third of a small session's time to be built."""

    def build() -> list[Any]:
        w = v1.get_variable("w", [6, 2], initializer=v1.glorot_uniform_initializer(3))
        q = v1.get_variable("q", [4, 4], initializer=v1.orthogonal_initializer(seed=5))
        one = v1.get_variable("one", initializer=tf.range(4.0) * 2)
        with tf.control_dependencies([one.initializer]):
            after = one.read_value() + 1
        return [w, q, one, v1.get_variable("two", initializer=after)]

    with tf.Graph().as_default():
        made = build()
        expected = helpers.plain_session().run(made)
    with scope(3, plan) as autodist:
        made = build()
        session = autodist.create_distributed_session()
        (ran,) = [fetches for fetches, _, _ in session._steps._steps]
        assert [op for op, _ in ran] == [made[-1].initializer]
        for value, one in zip(session.run(made), expected, strict=True):
            np.testing.assert_array_equal(value, one)
        session.run(made[0].assign(made[0] * 0))
        session.run(v1.global_variables_initializer())  # as any other fetch
        np.testing.assert_array_equal(session.run(made[0]), expected[0])


def test_writes_by_what_may_differ_are_the_same_on_all_replicas() -> None:
    with scope(3) as autodist:
        v, w = tf.Variable(0.0), tf.Variable(0.0)
        now = tf.cast(tf.timestamp(), tf.float32)
        write = [v.assign(now).op, w.assign(tf.random.uniform([])).op]
        session = autodist.create_distributed_session()
        session.run(write)
        assert 0 < session.run(w) < 1 and session.run(v) > 0
        for own in (v, w):
            made = session._steps._variables.made[own.op]
            with session._steps.graph.as_default():
                reads = [one.read_value() for one in made.components]
            assert len(set(session._steps.session.run(reads))) == 1


# --- Where it is ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_slots_are_placed_with_their_variables(name: str) -> None:
    with scope(2, {"a": strategy.PS(), "b": strategy.AllReduce()}) as autodist:
        a, b = (v1.get_variable(one, [4, 2]) for one in "ab")
        read = tf.gather(a, [0, 3]), b * 2
        optimizer = programs.OPTIMIZERS[name]()
        optimizer.minimize(tf.add_n(list(map(tf.nn.l2_loss, read))))
        made = _made(autodist.create_distributed_session())
        for slot in optimizer.get_slot_names():
            for v in (a, b):
                own = made[optimizer.get_slot(v, slot).op.name].placement
                assert own == made[v.op.name].placement
    assert made["a"].placement.owner == 0 and made["b"].placement.owner is None


def test_variables_and_their_slots_are_divided_alike() -> None:
    session = _session(programs.embedding, "adam", PARTS, 2)
    made, places = _made(session), _places(session)
    for name, shape in (("table", [5, 4]), ("dense", [6, 2])):
        for slot in ("", "/Adam", "/Adam_1"):
            parts = made[name + slot].parts
            assert [part.shape.as_list() for part in parts] == [shape] * 2
            assert [places[f"{name}{slot}/part_{k}"] for k in (0, 1)] == [[0], [1]]
    assert not hasattr(made["beta1_power"], "parts")
    node = session.strategy.node("table")
    assert (node.axis, node.sizes, node.shape) == (0, (5, 5), (10, 4))


def test_what_control_flow_uses_has_one_place_too() -> None:
    for program, name in ((programs.condition, "base"), (programs.loop, "w")):
        places = _places(_session(program, "momentum", strategy.PS(), 3))
        assert places[name] == places[f"{name}/Momentum"] == [0]
        parts = _places(_session(program, "momentum", PARTS, 3))
        assert parts[f"{name}/part_1"] == parts[f"{name}/Momentum/part_1"]
        assert len(parts[f"{name}/part_1"]) == 1 and name not in parts


def test_a_builder_is_told_of_what_is_trained_and_which_gradients_are_sparse() -> None:
    received: list[Any] = []

    class Told(strategy.AllReduce):
        def build(self, variables: Any, resources: Any) -> Any:
            received.extend(variables)
            return super().build(variables, resources)

    with scope(2, Told()) as autodist:
        table, both = (v1.get_variable(name, [10, 4]) for name in ("table", "both"))
        v1.get_variable("count", [], tf.int64)
        v1.get_variable("kept", [2], trainable=False)
        rows = tf.gather(table, [1, 2]) + tf.gather(both, [3, 4])
        loss = tf.nn.l2_loss(rows) + tf.nn.l2_loss(both)
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        autodist.create_distributed_session()
    facts = [
        (one.path, one.shape, one.sparse, one.order, one.nbytes) for one in received
    ]
    assert ("table", (10, 4), True, 0, 160) in facts
    assert [path for path, *_ in facts] == ["table", "both"]
    places = _places(_session(programs.condition, "sgd", strategy.Parallax(), 3))
    assert len(places["table"]) == 1 and len(places["base"]) == 3


_SHAPES = {"table": (10, 4), "dense": (12, 2)}


@pytest.mark.battery(2)
@pytest.mark.parametrize("name", [n for n in programs.BUILDERS if n != "Auto"])
def test_the_strategy_in_force_is_the_builders(name: str) -> None:
    builder = programs.BUILDERS[name]()
    session = _session(programs.embedding, "sgd", builder, 2)
    facts = [
        VariableFacts("table", (10, 4), "float32", True, True, 0, 160),
        VariableFacts("dense", (12, 2), "float32", True, False, 1, 96),
    ]
    builder = strategy.Rules(builder) if isinstance(builder, dict) else builder
    for node in builder.build(facts, Resources(["CPU:0", "CPU:1"])).nodes:
        actual = session.strategy.node(node.name)
        assert actual.axis == node.axis
        if node.axis is not None:
            extents = node.extents(_SHAPES[node.name][node.axis])
            assert list(actual.sizes) == list(extents)
        pairs = zip([actual, *actual.parts], [node, *node.parts], strict=True)
        for own, expected in ((a.synchronizer, b.synchronizer) for a, b in pairs):
            assert type(own) is type(expected)
            if isinstance(own, strategy.PSSynchronizer):
                place = expected.reduction_destination[-5:]
                assert own.reduction_destination.endswith(place)
                assert own.local_replication == expected.local_replication


# --- What a step makes of it ----------------------------------------------------------


def test_lookups_and_updates_join_no_parts() -> None:
    session = _session(programs.embedding, "adagrad", PARTS, 2)
    *_, step = session._steps._steps.values()
    stack = [getattr(one, "op", one) for one in step._fetches]
    needed = set(stack)
    while stack:
        op = stack.pop()
        sources = {*(t.op for t in op.inputs), *op.control_inputs} - needed
        needed |= sources
        stack += sources
    joined = [
        source.op.inputs[0].op.name
        for op in needed
        if op.type == "ConcatV2"
        for source in op.inputs
        if source.op.type == "ReadVariableOp"
    ]
    assert not any("table" in name for name in joined)
    applied = [op for op in needed if op.type.startswith("ResourceApplyAdagrad")]
    assert len(applied) == 2  # each part of the dense one, once for all replicas


def test_gradients_travel_as_the_strategy_says() -> None:
    bf16 = strategy.PartitionedAR(compressor="bf16")
    topk = strategy.AllReduce(compressor="ef(topk(ratio=0.5))")
    with mock.patch.object(logging, "warning") as warning:
        session = _session(programs.regression, "sgd", bf16, 2)
        sparsified = _session(programs.regression, "sgd", topk, 2)
        assert not warning.call_args_list
    assert session.strategy.node("w").parts[0].synchronizer.compressor == "bf16"
    assert "topk" in sparsified.strategy.node("w").synchronizer.compressor

    def build() -> Any:
        return programs.regression(programs.OPTIMIZERS["sgd"]())

    expected = helpers.run(build, None, sizes=programs.FEW)
    for builder, tolerance in ((bf16, 2e-2), (topk, None)):
        actual = helpers.run(build, 2, builder, sizes=programs.FEW)
        if tolerance is not None:
            helpers.assert_equal(actual, expected, tolerance)
        with pytest.raises(AssertionError):  # it is compressed
            helpers.assert_equal(actual, expected)
