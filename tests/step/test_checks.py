# SPDX-License-Identifier: Apache-2.0
"""Errors once all replicas are built; see test_outputs.py for programs."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import tensorflow as tf

from replicator.errors import ContextError, DeviceError, MismatchError
from replicator.step import checks
from replicator.world import World
from tests import helpers

WORLD = World.single_process([f"/device:CPU:{r}" for r in range(3)])


def test_equal_structures_pass() -> None:
    with tf.Graph().as_default():
        nest = {"a": (tf.zeros([2]), None), "b": tf.no_op()}
        checks.check_outputs([nest, nest, nest], WORLD, None)


def test_the_first_replica_that_differs_is_named() -> None:
    with tf.Graph().as_default(), pytest.raises(MismatchError) as caught:
        one = tf.zeros([2, 3])
        checks.check_outputs([one, one, [one]], WORLD, None)
    message = str(caught.value)
    assert "replica 0 (/device:CPU:0): float32[2, 3]" in message
    assert "replica 2 (/device:CPU:2): [float32[2, 3]]" in message.replace("'", "")
    assert "replica 1" not in message


class _Numbered(tf.experimental.ExtensionType):
    value: tf.Tensor
    number: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: tf.ones([1, 1]), lambda: tf.sparse.from_dense([[1.0]])),
        (lambda: tf.ones([1, 1]), lambda: tf.ragged.constant([[1.0]])),
        (lambda: _Numbered(1.0, 1), lambda: _Numbered(1.0, 2)),
    ],
    ids=["sparse", "ragged", "of an extension type"],
)
def test_what_differs_is_shown(one: Any, other: Any) -> None:
    with tf.Graph().as_default(), pytest.raises(MismatchError) as caught:
        checks.check_outputs([one(), other(), other()], WORLD, None)
    lines = str(caught.value).splitlines()
    shown = [line.partition("): ")[2] for line in lines if line.startswith("  replica")]
    assert len(shown) == 2 and shown[0] != shown[1] and all(shown)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (
            lambda v, x: tf.raw_ops.AssignVariableOp(resource=v.handle, value=x),
            "by AssignVariableOp",
        ),
        (
            lambda v, x: tf.raw_ops.ResourceApplyGradientDescent(
                var=v.handle, alpha=1.0, delta=x
            ),
            "by ResourceApplyGradientDescent",
        ),
    ],
    ids=["assign", "optimizer"],
)
def test_raw_writes_are_refused_unless_they_are_equal(write: Any, says: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(5.0, name="w")
    with pytest.raises(ContextError) as caught:
        repl.run(lambda: write(variable, tf.random.uniform([])))
    message = str(caught.value)
    assert "the values differ by RandomUniform" in message
    assert "writes variable w:0" in message and says in message
    assert "test_checks.py:" in message and "Fix: wrap the optimizer" in message
    assert helpers.components(variable) == [5.0, 5.0]
    repl.run(lambda: write(variable, repl.all_reduce(tf.random.uniform([]))))
    helpers.assert_replicas_equal([variable])
    assert variable.numpy() != 5.0


def test_writes_to_variables_from_outside_the_context_are_refused() -> None:
    repl, variable = helpers.make(2), tf.Variable(5.0)
    with pytest.raises(ContextError, match="(?s)created outside the context.*Fix:"):
        repl.run(lambda: variable.assign_add(1.0))
    assert float(variable) == 5.0
    helpers.make(1).run(lambda: variable.assign_add(1.0))
    assert float(variable) == 6.0


def test_writes_in_a_loops_condition_are_refused_likewise() -> None:
    repl, variable = helpers.make(2), tf.Variable(5.0)

    def step_fn() -> None:
        tf.while_loop(
            lambda n: tf.less(variable.assign_add(1.0), 9.0), lambda n: n + 1, [0]
        )

    with pytest.raises(ContextError, match="(?s)created outside the context.*Fix:"):
        repl.run(step_fn)
    assert float(variable) == 5.0


@pytest.mark.parametrize("inside", ["step", "function", "branch"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_which_variable_was_made_outside_is_said(inside: str, graph: bool) -> None:
    with tf.Graph().as_default() if graph else contextlib.nullcontext():
        repl = helpers.make(2)
        left, right = tf.Variable([1.0], name="left"), tf.Variable(2.0, name="right")

        def write() -> tf.Tensor:
            right.assign_add(left[0])
            return tf.constant(0.0)

        if inside == "function":
            step: Any = tf.function(write)
        elif inside == "branch":
            step = lambda: tf.cond(left[0] > 0, write, lambda: 0.0)  # noqa: E731
        else:
            step = write
        with pytest.raises(
            ContextError, match=r"(?s)outside .*\(right.*test_checks\.py"
        ):
            repl.run(lambda: step())


@pytest.mark.parametrize(
    ("place", "is_own"),
    [
        ("/job:worker/replica:0/task:1/device:CPU:0", True),
        ("/job:worker/task:1", True),
        ("/job:worker/task:1/cpu:0", True),
        ("/device:CPU:0", True),
        ("", True),
        ("/job:worker/task:10", False),
        ("/job:worker/task:0/device:CPU:0", False),
        ("/job:other/task:1", False),
    ],
)
def test_ops_are_on_devices_of_their_own_program(place: str, is_own: bool) -> None:
    devices = [f"/job:worker/replica:0/task:{k}/device:CPU:0" for k in range(2)]
    world = World.divided((0, 1), 1, devices)
    build: Any = types.SimpleNamespace(world=world, compared=[1])
    with tf.Graph().as_default(), tf.device(place):
        op = tf.no_op()
        with contextlib.nullcontext() if is_own else pytest.raises(DeviceError):
            checks.check_places([[op]], build)
