# SPDX-License-Identifier: Apache-2.0
"""Facts about ops that follow from their type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.ir.kinds import (
    Kind,
    acting,
    has_effect,
    kind_of,
    resource_inputs,
    touched,
)

KINDS: dict[str, tuple[Callable[[], Any], Kind]] = {
    "Add": (
        lambda: tf.raw_ops.Add(x=1.0, y=1.0),
        Kind(seeded=False, calls=False, stateful=False, effect=False, resources=False),
    ),
    "RandomUniform": (
        lambda: tf.raw_ops.RandomUniform(shape=[1], dtype=tf.float32),
        Kind(seeded=True, calls=False, stateful=True, effect=False, resources=False),
    ),
    "StatelessIf": (
        lambda: tf.cond(tf.constant(True), lambda: 1, lambda: 2),
        Kind(seeded=False, calls=True, stateful=False, effect=False, resources=True),
    ),
    "StatelessCase": (
        lambda: tf.switch_case(tf.constant(0), [lambda: 1, lambda: 2]),
        Kind(seeded=False, calls=True, stateful=False, effect=False, resources=True),
    ),
    "StatelessWhile": (
        lambda: tf.while_loop(lambda n: n < 1, lambda n: n + 1, [tf.constant(0)]),
        Kind(seeded=False, calls=True, stateful=False, effect=False, resources=True),
    ),
    "EagerPyFunc": (
        lambda: tf.py_function(lambda: None, [], []),
        Kind(seeded=False, calls=False, stateful=True, effect=True, resources=True),
    ),
}


@pytest.mark.parametrize("type_name", KINDS)
def test_kind_of(type_name: str) -> None:
    build, expected = KINDS[type_name]
    with tf.Graph().as_default() as graph:
        build()
        (op,) = [op for op in graph.get_operations() if op.type == type_name]
    assert kind_of(op) == expected


def test_resource_inputs_are_found_with_their_places() -> None:
    with tf.Graph().as_default():
        variable = tf.Variable(1.0)
        write = variable.assign(2.0, read_value=False)
        assert [(k, t.name) for k, t in resource_inputs(write)] == [
            (0, variable.handle.name)
        ]
        assert resource_inputs(tf.identity(variable.handle).op)
        assert not resource_inputs(tf.identity(1.0).op)
        assert not resource_inputs((tf.constant(1.0) + 1.0).op)


def test_which_ops_have_an_effect() -> None:
    with tf.Graph().as_default():
        variable = tf.Variable(1.0)
        assert has_effect(variable.assign(2.0, read_value=False))
        assert has_effect(tf.print("hello"))
        assert not has_effect((tf.constant(1.0) + 1.0).op)
        read = variable.read_value().op
        while read.type == "Identity":
            read = read.inputs[0].op
        assert read.type == "ReadVariableOp"
        assert not has_effect(read)


def test_which_ops_act() -> None:
    with tf.Graph().as_default() as graph:
        variable = tf.Variable(1.0)
        before = graph.get_operations()
        total = tf.random.uniform([]) + variable.read_value()
        tf.print(variable.assign_add(total, read_value=False).name)
        ops = graph.get_operations()[len(before) :]
        (actual,) = acting([ops])
    expected = {"ReadVariableOp", "AssignAddVariableOp", "PrintV2"}
    assert expected <= {op.type for op in actual}
    assert [op for op in ops if op in actual] == actual
    assert not {"AddV2", "RandomUniform", "Const"} & {op.type for op in actual}
    left = [op for op in ops if op not in actual]
    assert not any(has_effect(op) or resource_inputs(op) for op in left)


def test_what_an_op_touches() -> None:
    @tf.function
    def function() -> None:
        graph = tf.compat.v1.get_default_graph()
        handle = id(graph.capture(variable.handle))
        other = id(graph.capture(slot.handle))
        variable.read_value()
        read = next(op for op in graph.get_operations() if op.type == "ReadVariableOp")
        assert touched(read) == ({handle}, set())
        assert touched(variable.assign(2.0, read_value=False)) == (set(), {handle})
        momentum = tf.raw_ops.ResourceApplyMomentum(
            var=variable.handle, accum=slot.handle, lr=0.1, grad=1.0, momentum=0.9
        )
        assert touched(momentum) == (set(), {handle, other})

        @tf.function
        def both() -> None:
            slot.assign(variable)

        both()
        call = graph.get_operations()[-1]
        while not kind_of(call).calls:
            call = call.inputs[0].op if call.inputs else call.control_inputs[0]
        assert touched(call) == ({handle}, {other})
        assert touched((tf.constant(1.0) + 1.0).op) == (set(), set())

    variable, slot = tf.Variable(1.0), tf.Variable(2.0)
    function.get_concrete_function()
