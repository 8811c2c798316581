# SPDX-License-Identifier: Apache-2.0
"""The record of each communication: its place, and its traffic, against counts."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.lowering.record import Link, Nesting, add, function_name, links
from tests import helpers

DEVICES = tuple(f"/device:CPU:{r}" for r in range(3))


def _on(replica_id: int, make: Any) -> tf.Tensor:
    with tf.device(DEVICES[replica_id]):
        return make()


def _ones(*shape: int | None) -> tf.Tensor:
    return tf.compat.v1.placeholder(tf.float32, shape)


# --- Places --------------------------------------------------------------------------


def test_places_multiply_what_is_known() -> None:
    loop = Nesting().inside("loop body", 5)
    assert loop == Nesting(("loop body",), 5)
    assert loop.inside("function f") == Nesting(("loop body", "function f"), 5)
    assert loop.inside("loop body", 3).times == 15
    unknown = loop.inside("conditional (true)", None)
    assert unknown.times is None
    assert unknown.inside("loop body", 3).times is None


def test_functions_are_shown_by_the_names_that_users_gave_them() -> None:
    @tf.function
    def inner_2(x: tf.Tensor) -> tf.Tensor:
        return tf.sin(x)

    @tf.function
    def outer(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = inner_2(x)
        return tape.gradient(y, x)

    graph = outer.get_concrete_function(tf.constant(1.0)).graph
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    assert [function_name(op) for op in calls] == ["function inner_2"] * 2


# --- Traffic -------------------------------------------------------------------------


def test_a_hub_receives_from_all_and_sends_to_all() -> None:
    with tf.Graph().as_default():
        operands = [[_on(r, lambda: _ones(5, 2))] for r in range(3)]
        total = _on(1, lambda: tf.add_n([operand[0] for operand in operands]))
        actual = links((0, 1, 2), operands, [[total]] * 3, DEVICES)
    assert actual == (Link(0, 1, 40), Link(1, 0, 40), Link(1, 2, 40), Link(2, 1, 40))


def test_what_stays_on_its_device_does_not_travel() -> None:
    with tf.Graph().as_default():
        tensors = [_on(r, lambda: _ones(4)) for r in range(3)]
        results = [[_on(r, lambda r=r: tf.sin(tensors[r]))] for r in range(3)]
        assert links((0, 1, 2), [[x] for x in tensors], results, DEVICES) == ()


def test_a_tensor_travels_once_to_each_device_however_often_it_is_read() -> None:
    with tf.Graph().as_default():
        x = _on(0, lambda: _ones(4))
        double = _on(2, lambda: x + x)
        actual = links((0, 2), [[x], []], [[], [double, x, x]], DEVICES)
    assert actual == (Link(0, 2, 16),)


def test_what_was_computed_before_a_communication_is_no_part_of_it() -> None:
    with tf.Graph().as_default():
        early = _on(0, lambda: _ones(1000))
        late = _on(1, lambda: tf.reduce_sum(early))
        actual = links((1, 2), [[late], []], [[], [late]], DEVICES)
    assert actual == (Link(1, 2, 4),)


def test_an_operand_is_its_replicas_wherever_it_lies() -> None:
    """A replica may have several devices of its own."""
    with tf.Graph().as_default(), tf.device("/device:CPU:7"):
        x = _ones(2)
        assert links((0, 1), [[x], []], [[], [x]], DEVICES) == (Link(0, 1, 8),)


def test_what_several_replicas_hand_in_need_not_travel_to_them() -> None:
    """A constant from outside of the step is one tensor for all."""
    with tf.Graph().as_default():
        x = _on(0, lambda: _ones(2))
        assert links((0, 1), [[x], [x]], [[x], [x]], DEVICES) == ()
        actual = links((0, 1, 2), [[x], [x], []], [[x], [x], [x]], DEVICES)
    assert actual == (Link(0, 2, 8),)


@pytest.mark.parametrize("shape", [(None, 1), None])
def test_an_unknown_size_makes_the_sum_unknown(shape: Any) -> None:
    with tf.Graph().as_default():
        x, y = (_on(0, lambda s=s: helpers.opaque([[1.0]], s)) for s in (shape, ()))
        actual = links((0, 1), [[x, y], []], [[], [x, y]], DEVICES)
    assert actual == (Link(0, 1, None),)


def test_sizes_add_up() -> None:
    assert add([]) == 0
    assert add([1, 2]) == 3
    assert add([1, None, 2]) is None
