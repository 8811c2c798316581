# SPDX-License-Identifier: Apache-2.0
"""Outside steps, nothing writes a variable of several components by its handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import replicator
from tests import helpers
from tests.variables import parted
from tests.variables.writes import FUNCTIONS

v1 = tf.compat.v1
GRADIENTS = [1.0, 1.0]


class _Own(v1.train.GradientDescentOptimizer):
    """An optimizer of the user's, which takes the handle in a file of its own."""

    def _resource_apply_dense(self, grad: Any, handle: Any) -> Any:
        return tf.raw_ops.ResourceApplyGradientDescent(
            var=handle.handle, alpha=0.5, delta=grad
        )


def _applied(optimizer: Any) -> Callable[[Any], Any]:
    return lambda v: optimizer().apply_gradients([(tf.constant(GRADIENTS), v)])


# What writes by a handle, the beginning of the message, and the fix.
WRITERS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    **{
        name: (write, f"tf.compat.v1.{name}", f"own method {name}")
        for name, write in FUNCTIONS.items()
    },
    "v1": (
        _applied(lambda: v1.train.GradientDescentOptimizer(0.5)),
        "an optimizer of tf.compat.v1.train",
        "inside a step_fn",
    ),
    "older": (
        _applied(lambda: tf_keras.optimizers.legacy.SGD(0.5)),
        "an optimizer of legacy Keras",
        "inside a step_fn",
    ),
    "raw op": (
        lambda v: tf.raw_ops.AssignSubVariableOp(resource=v.handle, value=GRADIENTS),
        "code outside of TensorFlow",
        "own methods",
    ),
    "own v1": (_applied(lambda: _Own(0.5)), "code outside of TensorFlow", "methods"),
}


@pytest.mark.battery(3)
@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@pytest.mark.parametrize("writer", WRITERS)
def test_writes_by_a_handle_are_refused(writer: str, mode: str) -> None:
    write, who, fix = WRITERS[writer]
    repl = helpers.make(2, variables="mirrored")
    with tf.Graph().as_default() if mode == "session" else tf.name_scope(""):
        with repl.context():
            variable = tf.Variable([5.0, 5.0], name="v")
        if mode == "function":
            write = tf.function(write, autograph=False)
        with pytest.raises(
            replicator.ContextError,
            match=rf"(?s){who}.* handle of variable v:0 outside.*replica 0 only.*"
            rf"(test_handles|writes).py:\d+.*Fix: .*{fix}",
        ):
            write(variable)
    if mode != "session":
        np.testing.assert_array_equal(helpers.components(variable), [[5.0, 5.0]] * 2)


SUM = {
    "synchronization": tf.VariableSynchronization.ON_READ,
    "aggregation": tf.VariableAggregation.SUM,
}


@pytest.mark.parametrize("kind", ["on_read", "parts"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_so_are_those_of_summands_and_of_parts(name: str, kind: str) -> None:
    repl = parted.replicas(2) if kind == "parts" else helpers.make(2)
    with repl.context():
        variable = tf.Variable([5.0, 5.0], **(SUM if kind == "on_read" else {}))
    for write in (FUNCTIONS[name], tf.function(FUNCTIONS[name], autograph=False)):
        with pytest.raises(
            replicator.ContextError, match=rf"(?s){name} takes.*own method {name}"
        ):
            write(variable)
    np.testing.assert_array_equal(variable, [5.0, 5.0])


@pytest.mark.parametrize("writer", WRITERS)
def test_the_only_component_is_written_as_on_one_device(writer: str) -> None:
    write, _, _ = WRITERS[writer]
    plain = tf.Variable([5.0, 5.0])
    write(plain)
    for repl in (helpers.make(1), helpers.make(2, variables="sharded")):
        with repl.context():
            variable = tf.Variable([5.0, 5.0])
        write(variable)
        np.testing.assert_array_equal(variable, plain)


def test_a_component_can_be_read_by_its_own_handle() -> None:
    repl = helpers.make(2, variables="mirrored")
    with repl.context():
        variable = tf.Variable([5.0, 5.0])
    handle = variable.components[1].handle
    read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    np.testing.assert_array_equal(read, variable)
