"""What is known of an op by its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.kinds import Kind, has_effect, kind_of, resource_inputs

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
