# SPDX-License-Identifier: Apache-2.0
"""The variables of a program are where they are decided to be, and ops with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.autodist import marked
from replicator.autodist.cuts import Decided
from replicator.autodist.program import Program
from replicator.autodist.variables import SCOPE, Variables
from replicator.variables.chooser import Chosen
from replicator.variables.placement import Mirrored, Owned
from tests import helpers
from tests.helpers import v1_control_flow

v1 = tf.compat.v1
COUNT = 3


@functools.cache
def _settings() -> Any:
    return helpers.make(COUNT, variables="sharded")._settings


class _Made:
    """A program with variables w, b, a slot of w, and n, on three replicas."""

    def __init__(
        self,
        build: Callable[..., Any] = lambda w: w.read_value(),
        **chosen: Chosen,
    ) -> None:
        made: list[Any] = []
        with tf.Graph().as_default() as graph:
            with tf.variable_creator_scope(marked.creator(made)):
                tf.Variable([[0.0, 0.0]] * 4, name="a_slot")
                w = tf.Variable([[1.0, 2.0]] * 4, name="w")
                tf.Variable([1.0, 2.0], name="b")
                tf.Variable(3, name="n", trainable=False)
                self.fetches = build(w)
        self.program = Program(graph, made)
        settings = _settings()
        self.devices = settings.world.devices
        with tf.Graph().as_default() as self.graph:
            decided = Decided(chosen, {}, {"a_slot": "w"})
            self.variables = Variables(self.program, settings, decided)
        self.made = self.variables.made

    def handle(self, name: str) -> tf.Tensor:
        return self.program.variables[name].op.outputs[0]

    def owner_of(self, name: str) -> int | None:
        return self.variables.owner_of(self.program.variables[name])

    def placed(self, op: tf.Operation, r: int = 1) -> str:
        return self.variables.placed(self.program, op, self.devices[r])


def test_there_is_one_for_each_of_the_programs() -> None:
    made = _Made()
    assert set(made.made) == {"a_slot", "w", "b", "n"}
    for name, original in made.program.variables.items():
        variable = made.made[name]
        assert (variable.shape, variable.dtype) == (original.shape, original.dtype)
        assert not variable.trainable  # no strategy is asked once more
        assert variable.name.startswith(f"{SCOPE}/{name}")
        assert variable.graph is made.graph


@pytest.mark.parametrize("owner", range(COUNT))
def test_variables_are_where_it_was_decided_and_slots_with_them(owner: int) -> None:
    made = _Made(w=Chosen(Owned(owner)), b=Chosen(Mirrored()))
    assert made.owner_of("w") == made.owner_of("a_slot") == owner
    assert made.owner_of("b") is None
    names = {
        one.name.split("/")[-1].partition(":")[0] for one in made.variables.owned()
    }
    assert {"w", "a_slot"} <= names and "b" not in names


def test_handles_are_those_of_the_owner_or_of_each_replica() -> None:
    made = _Made(w=Chosen(Owned(2)), b=Chosen(Mirrored()))
    for name, components in (
        ("w", [made.made["w"].storage.first] * COUNT),
        ("b", made.made["b"].components),
    ):
        for r, component in enumerate(components):
            found = made.variables.handle(made.program, made.handle(name), r, None)
            assert found is component.handle
    assert len({id(one) for one in made.made["b"].components}) == COUNT
    other = made.fetches
    assert made.variables.handle(made.program, other, 0, None) is None
    assert made.variables.behind(made.program, other) is None
    assert made.variables.behind(made.program, made.handle("w")) is made.made["w"]


def test_what_is_mirrored_afterwards_says_why() -> None:
    made = _Made(w=Chosen(Owned(2)))
    assert made.variables.moved() == {}
    with made.graph.as_default():
        made.variables.mirror(made.program, {"w": "a loop has to write it"})
    moved = made.variables.moved()
    assert moved["w"].startswith("a loop has to write it, at ") and "b" not in moved
    assert "test_variables.py" in moved["w"]
    assert made.owner_of("w") is None
    handles = [
        made.variables.handle(made.program, made.handle("w"), r, None)
        for r in range(COUNT)
    ]
    assert len(set(map(id, handles))) == COUNT


def _asked(device: str) -> Callable[[Any], tf.Operation]:
    def build(w: Any) -> tf.Operation:
        with tf.device(device):
            return tf.zeros([]).op

    return build


def _element(w: Any) -> tf.Operation:
    data = tf.data.Dataset.range(3)
    return v1.data.make_one_shot_iterator(data).get_next().op


def _lookup(w: Any) -> tf.Operation:
    with tf.device("CPU:0"):
        return tf.raw_ops.ResourceGather(
            resource=w.handle, indices=[1], dtype=tf.float32
        ).op


def _switch(w: Any) -> tf.Operation:
    test = v1.placeholder(tf.bool, [])
    return tf.raw_ops.Switch(data=w.handle, pred=test)[0].op


OWNED: dict[str, Callable[[Any], tf.Operation]] = {
    "a read": lambda w: (
        tf.raw_ops.ReadVariableOp(resource=w.handle, dtype=tf.float32).op
    ),
    "an update": lambda w: w.assign_add(w, read_value=False),
    "a lookup": _lookup,
    "a branch of TensorFlow 1": _switch,
}


@pytest.mark.parametrize("name", OWNED)
def test_ops_are_where_the_variable_is_that_they_use(name: str) -> None:
    with v1_control_flow():
        made = _Made(OWNED[name], w=Chosen(Owned(2)))
    assert made.placed(made.fetches) == made.devices[2]
    with v1_control_flow():
        made = _Made(OWNED[name], w=Chosen(Mirrored()))
    assert made.placed(made.fetches) == made.devices[1]


@pytest.mark.parametrize("on", ["", "CPU:7"])
def test_copies_are_read_where_they_are_and_variables_written_where_they_are(
    on: str,
) -> None:
    for name, is_read in (("a read", True), ("a lookup", True), ("an update", False)):
        made = _Made(OWNED[name], w=Chosen(Owned(2, on, proxies=True)))
        there = on or made.devices[2]
        assert made.placed(made.fetches) == (made.devices[1] if is_read else there)


def test_calls_are_on_the_replica_that_makes_them() -> None:
    def build(w: Any) -> tf.Operation:
        return tf.function(lambda: w.read_value())().op

    made = _Made(build, w=Chosen(Owned(2)))
    call = made.fetches
    while "Call" not in call.type:
        call = call.inputs[0].op
    assert made.placed(call) == made.devices[1]


@pytest.mark.parametrize(
    ("asked", "kind", "index"),
    [
        *[("", "CPU", 1), ("CPU:0", "CPU", 1), ("/device:CPU:2", "CPU", 1)],
        *[("GPU:0", "GPU", 0), ("/job:localhost/GPU:2", "GPU", 2)],
        ("/job:localhost", "CPU", 1),
    ],
)
def test_other_ops_are_on_their_replicas_host_on_the_kind_of_device_asked_for(
    asked: str, kind: str, index: int
) -> None:
    made = _Made(_asked(asked))
    found = tf.DeviceSpec.from_string(made.placed(made.fetches))
    own = tf.DeviceSpec.from_string(made.devices[1])
    assert found == own.replace(device_type=kind, device_index=index)


def test_ops_on_what_is_shared_are_placed_with_it() -> None:
    made = _Made(_element)
    assert made.placed(made.fetches) == ""


def test_owners_are_told_of_handles_that_are_passed_on() -> None:
    made = _Made(lambda w: tf.identity(w.handle), w=Chosen(Owned(2)))
    for handle, expected in (
        (made.handle("w"), made.devices[2]),
        (made.fetches, made.devices[2]),
    ):
        assert made.variables.at_owner(made.program, handle) == expected
    mirrored = _Made(w=Chosen(Mirrored()))
    assert mirrored.variables.at_owner(mirrored.program, mirrored.handle("w")) == ""
