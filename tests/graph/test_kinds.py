"""What is known of an op by its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.kinds import Kind, kind_of

KINDS: dict[str, tuple[Callable[[], Any], Kind]] = {
    "Add": (
        lambda: tf.raw_ops.Add(x=1.0, y=1.0),
        Kind(seeded=False, calls=False, stateful=False),
    ),
    "RandomUniform": (
        lambda: tf.raw_ops.RandomUniform(shape=[1], dtype=tf.float32),
        Kind(seeded=True, calls=False, stateful=True),
    ),
    "StatelessIf": (
        lambda: tf.cond(tf.constant(True), lambda: 1, lambda: 2),
        Kind(seeded=False, calls=True, stateful=False),
    ),
    "StatelessCase": (
        lambda: tf.switch_case(tf.constant(0), [lambda: 1, lambda: 2]),
        Kind(seeded=False, calls=True, stateful=False),
    ),
    "StatelessWhile": (
        lambda: tf.while_loop(lambda n: n < 1, lambda n: n + 1, [tf.constant(0)]),
        Kind(seeded=False, calls=True, stateful=False),
    ),
    "EagerPyFunc": (
        lambda: tf.py_function(lambda: None, [], []),
        Kind(seeded=False, calls=False, stateful=True),
    ),
}


@pytest.mark.parametrize("type_name", KINDS)
def test_kind_of(type_name: str) -> None:
    build, expected = KINDS[type_name]
    with tf.Graph().as_default() as graph:
        build()
        (op,) = [op for op in graph.get_operations() if op.type == type_name]
    assert kind_of(op) == expected
