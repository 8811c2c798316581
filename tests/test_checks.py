"""What is refused once all replicas are built; see test_outputs.py for programs."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator import checks
from replicator.errors import ContextError, MismatchError
from tests import helpers

DEVICES = ("/device:CPU:0", "/device:CPU:1", "/device:CPU:2")


def test_equal_structures_pass() -> None:
    with tf.Graph().as_default():
        nest = {"a": (tf.zeros([2]), None), "b": tf.no_op()}
        checks.check_outputs([nest, nest, nest], DEVICES)


def test_the_first_replica_that_differs_is_named() -> None:
    with tf.Graph().as_default(), pytest.raises(MismatchError) as caught:
        one = tf.zeros([2, 3])
        checks.check_outputs([one, one, [one]], DEVICES)
    message = str(caught.value)
    assert "replica 0 (/device:CPU:0): float32[2, 3]" in message
    assert "replica 2 (/device:CPU:2): [float32[2, 3]]" in message.replace("'", "")
    assert "replica 1" not in message


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (
            lambda v: tf.raw_ops.AssignVariableOp(resource=v.handle, value=1.0),
            "by AssignVariableOp",
        ),
        (
            lambda v: tf.raw_ops.ResourceApplyGradientDescent(
                var=v.handle, alpha=1.0, delta=1.0
            ),
            "by ResourceApplyGradientDescent",
        ),
    ],
    ids=["assign", "optimizer"],
)
def test_raw_writes_to_mirrored_variables_are_refused(write: Any, says: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(5.0, name="w")
    with pytest.raises(ContextError) as caught:
        repl.run(lambda: write(variable))
    message = str(caught.value)
    assert "writes variable w:0" in message and says in message
    assert "test_checks.py:" in message and "Fix: wrap the optimizer" in message
    assert helpers.components(variable) == [5.0, 5.0]


def test_writes_to_variables_from_outside_the_context_are_refused() -> None:
    repl, variable = helpers.make(2), tf.Variable(5.0)
    with pytest.raises(ContextError, match="(?s)made outside of the context.*Fix:"):
        repl.run(lambda: variable.assign_add(1.0))
    assert float(variable) == 5.0
    helpers.make(1).run(lambda: variable.assign_add(1.0))
    assert float(variable) == 6.0
