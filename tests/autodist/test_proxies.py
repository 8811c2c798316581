# SPDX-License-Identifier: Apache-2.0
"""Replicas' copies of a variable hold what its owner has, after each write."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import marked, proxies
from replicator.autodist.program import Program
from tests import helpers
from tests.autodist.helpers import Copied, copied

v1 = tf.compat.v1
W = np.array([1.0, 2.0, 3.0], np.float32)


def _program(w: Any) -> dict[str, Any]:
    read = w.read_value()
    update = w.assign_add(2 * read, read_value=False)
    with tf.control_dependencies([update]):
        after = 10 * w.read_value()
    return {"read": read, "init": w.initializer, "update": update, "after": after}


def _kept_up(has_copies: bool = True, num_replicas: int = 3) -> Copied:
    """Returns the program on replicas, of which the first owns the variable."""
    made = copied(
        *(_program, W, lambda found: [found["init"], found["update"]], num_replicas),
        is_owned=True,
    )
    variable = types.SimpleNamespace(
        placement=types.SimpleNamespace(has_copies=has_copies),
        components=made.components,
        storage=types.SimpleNamespace(first=made.components[0]),
        dtype=tf.float32,
    )
    with made.graph.as_default():
        devices = [component.device for component in made.components]
        proxies.keep_up(made.program, made.places, {"w": variable}, devices)
    return made


def test_all_copies_are_written_where_the_variable_is() -> None:
    made = _kept_up()
    read, init, update, after = (made.of(one) for one in made.fetches.values())
    assert len(set(init)) == len(set(update)) == 1
    with v1.Session(graph=made.graph) as session:
        session.run(init[0])  # though nothing can be read before
        np.testing.assert_array_equal(session.run(read), [W] * 3)
        session.run(update[0])
        np.testing.assert_array_equal(session.run(read), [3 * W] * 3)
        np.testing.assert_array_equal(session.run(after), [90 * W] * 3)


def test_each_replica_reads_its_own_copy_on_its_device() -> None:
    made = _kept_up()
    for read, component in zip(
        made.of(made.fetches["read"]), made.components, strict=True
    ):
        handle = _reads(read.op)[-1].inputs[0]
        assert handle is component.handle


def test_copies_are_refreshed_behind_the_reads_of_their_replica() -> None:
    made = _kept_up()
    reads = [one.op for one in made.of(made.fetches["read"])]
    for kind, waits in (("update", True), ("init", False)):
        (refresh,) = set(made.of(made.fetches[kind]))
        writes = [op for op in refresh.control_inputs if op.type.startswith("Assign")]
        assert len(writes) == 3
        for write, component, read in zip(writes, made.components, reads, strict=True):
            assert write.inputs[0] is component.handle
            if component is not made.components[0]:  # for that see freshness.py
                assert write.device == component.device
                assert any(op in write.control_inputs for op in _reads(read)) == waits


def _reads(op: tf.Operation) -> list[tf.Operation]:
    """Returns an op and the read that it passes on."""
    return [op] if op.type == "ReadVariableOp" else [op, *_reads(op.inputs[0].op)]


def test_what_waited_for_a_write_waits_for_all_copies() -> None:
    made = _kept_up()
    (refresh,) = set(made.of(made.fetches["update"]))
    users = [op for op in made.graph.get_operations() if refresh in op.control_inputs]
    assert len([op for op in users if op.type == "ReadVariableOp"]) == 3


def test_variables_without_copies_are_left_alone() -> None:
    made = _kept_up(has_copies=False)
    assert not any("proxies" in op.name for op in made.graph.get_operations())
    with v1.Session(graph=made.graph) as session:
        session.run([one.initializer for one in made.components])
        session.run(made.of(made.fetches["init"])[0])
        found = session.run(made.of(made.fetches["read"]))
    np.testing.assert_array_equal(found, [W] * 3)


def _branch(w: Any) -> Any:
    test = helpers.opaque(True)
    return tf.cond(test, lambda: w.read_value(), lambda: tf.zeros([3]))


FOLLOWED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "reads and updates": (_program, True),
    "nothing": (lambda w: (), True),
    "lookups": (lambda w: tf.gather(w, [1]), True),
    "a function": (lambda w: tf.function(lambda: w.read_value())(), False),
    "a branch": (_branch, False),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_variables_that_control_flow_uses_have_no_copies(name: str) -> None:
    build, expected = FOLLOWED[name]
    assert _can_follow(build) == expected


def test_nor_have_those_in_the_control_flow_of_tensorflow_1() -> None:
    with helpers.v1_control_flow():
        assert not _can_follow(_branch)


def _can_follow(build: Callable[[Any], Any]) -> bool:
    made: list[Any] = []
    with tf.Graph().as_default() as graph:
        with tf.variable_creator_scope(marked.creator(made)):
            build(tf.Variable(W, name="w"))
    return proxies.can_follow(Program(graph, made), "w")
