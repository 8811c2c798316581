# SPDX-License-Identifier: Apache-2.0
"""Equal values where the replicas' loops and branches capture different ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator import ContextError
from tests import helpers


def _in_a_loop(body: Callable[[], Any]) -> None:
    tf.while_loop(lambda i: i < 2, lambda i: (body(), i + 1)[1:], [0])


def _in_a_branch(body: Callable[[], Any]) -> None:
    condition = tf.constant(1.0) > tf.random.stateless_uniform([], [1, 2])
    tf.cond(condition, lambda: (body(), 0)[1], lambda: 0)


PLACES = {"loop": _in_a_loop, "branch": _in_a_branch}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("more", [False, True], ids=["another order", "more"])
def test_replicas_may_capture_otherwise(place: str, more: bool) -> None:
    """The equality of written values follows the captures, whatever their order."""
    repl = helpers.make(2)
    with repl.context():
        a, b, c = (tf.Variable([1.0, 2.0], name=name) for name in "abc")

    def step_fn(equal: bool) -> None:
        noise = tf.random.normal([2])
        gradient = repl.all_reduce(noise)

        def body() -> None:
            if repl.replica_id:
                a.assign(b + noise if more else gradient + noise)
            else:
                a.assign(a if more else noise + gradient)
            value = c + gradient if equal else noise
            tf.raw_ops.AssignVariableOp(resource=c.handle, value=value)

        PLACES[place](body)

    repl.run(lambda: step_fn(True))
    helpers.assert_replicas_equal([a, b, c])
    with pytest.raises(
        ContextError, match=r"(?s)writes variable c:0 by Assign.*differ"
    ):
        repl.run(lambda: step_fn(False))


def _by_branch(repl: Any, decides: tf.Tensor, group: Any) -> Any:
    def larger() -> tuple[tf.Tensor, tf.Tensor]:
        return repl.all_reduce(1.0, group=group), tf.constant([1, 1])

    return tf.cond(decides > 2.0, larger, lambda: (0.0, tf.constant([2, 2])))[1]


def _by_turns(repl: Any, decides: tf.Tensor, group: Any) -> Any:
    return tf.while_loop(
        lambda n, count: n < decides,
        lambda n, count: (n + repl.all_reduce(0.5, group=group), count + 1),
        [tf.constant(0.0), tf.constant([0, 0])],
    )[1]


@pytest.mark.parametrize("by", [_by_branch, _by_turns])
def test_groups_may_choose_otherwise(by: Any) -> None:
    """A group compares its members' choices only, not those of other groups."""
    repl = helpers.make(4)
    pairs = repl.groups([[0, 1], [2, 3]])
    with repl.context():
        variable = tf.Variable([0, 0])

    def step_fn() -> tf.Tensor:
        own = helpers.opaque(float(repl.replica_id))
        value = by(repl, repl.all_reduce(own, group=pairs), pairs)  # of 1, and of 5
        variable.assign(value)
        return value

    with pytest.raises(
        tf.errors.InvalidArgumentError, match="replicas assign different values"
    ):
        repl.run(step_fn)
    helpers.assert_replicas_equal([variable])


def test_choices_at_other_places_may_be_others() -> None:
    """Each is compared with that at the same place of the other replicas' program."""
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable([0, 0])

    def step_fn() -> None:
        total = repl.all_reduce(helpers.opaque(1.0))
        places = [_by_branch(repl, total + k, None) for k in range(2)]
        variable.assign(places[repl.replica_id])

    with pytest.raises(
        tf.errors.InvalidArgumentError, match="replicas assign different values"
    ):
        repl.run(step_fn)
    helpers.assert_replicas_equal([variable])


@pytest.mark.parametrize("right", [True, False])
def test_each_call_of_a_function_communicates_by_itself(right: bool) -> None:
    """Also that of a function which is traced only once."""
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(0.0)

    def step_fn() -> None:
        total = tf.function(repl.all_reduce)
        traced = total.get_concrete_function(tf.TensorSpec([], tf.float32))
        both = [traced(tf.constant(1.0)), traced(tf.constant(-1.0))]
        value = both[0 if right else repl.replica_id]
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

    if right:
        repl.run(step_fn)
        helpers.assert_replicas_equal([variable])
        return
    with pytest.raises(ContextError, match=r"(?s)drift.*differ by PyFunc.*all_reduce"):
        repl.run(step_fn)


def test_reads_before_a_step_are_of_different_values() -> None:
    """A variable that is written between two reads has two values."""
    repl = helpers.make(2)
    with repl.context():
        variable, other = tf.Variable(0.0), tf.Variable(0.0)

    @tf.function
    def run(same: bool) -> None:
        reads = [other.read_value()]
        other.assign_add(1.0)
        reads.append(other.read_value())

        def step_fn() -> None:
            value = reads[0 if same else repl.replica_id] * 2.0
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

        repl.run(step_fn)

    run(True)
    helpers.assert_replicas_equal([variable])
    with pytest.raises(ContextError, match="drift apart"):
        run(False)
