# SPDX-License-Identifier: Apache-2.0
"""What goes from turn to turn, or into lists, is what lists and loops make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.autodist import turns
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value
from replicator.graph.ir import switching
from tests.autodist.helpers import told
from tests.helpers import v1_control_flow

v1 = tf.compat.v1
Make = Callable[[tf.Tensor], tf.Tensor]
ROWS, MEAN, MAX = Value(Kind.ROWS), Value(Kind.MEAN), Value(Kind.MAX)
LOOPS = pytest.mark.parametrize("is_v1", [False, True], ids=["v2", "v1"])


def _array(x: tf.Tensor, make: Callable[[Any, Any], Any], size: int = 3) -> Any:
    """Returns a TensorArray that a loop fills."""
    array = tf.TensorArray(tf.float32, size)
    return tf.while_loop(
        lambda k, a: k < size,
        lambda k, a: (k + 1, a.write(k, make(x, k))),
        (0, array),
    )[1]


def _unstacked(x: tf.Tensor) -> tf.TensorArray:
    return tf.TensorArray(tf.float32, 3).unstack(x)


def _summed(array: tf.TensorArray, size: int = 3) -> tf.Tensor:
    """Returns the sum of an array's elements, of a loop that reads them."""
    return tf.while_loop(
        lambda k, total: k < size,
        lambda k, total: (k + 1, total + array.read(k)),
        (1, array.read(0)),
    )[1]


def _scaled(x: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
    return x * tf.cast(k + 1, tf.float32)


LISTS: dict[str, tuple[Make, Kind]] = {
    "rows in a list": (lambda x: _array(x, _scaled).stack(), Kind.ROWS),
    "columns in a list": (
        lambda x: _array(tf.transpose(x), _scaled).stack(),
        Kind.ROWS,
    ),
    "means in a list": (
        lambda x: _array(x, lambda x, k: tf.reduce_mean(_scaled(x, k), 0)).stack(),
        Kind.MEAN,
    ),
    "constants in a list": (
        lambda x: _array(x, lambda x, k: tf.ones([2])).stack(),
        Kind.SAME,
    ),
    "columns, one by one": (lambda x: _unstacked(tf.transpose(x)).read(1), Kind.ROWS),
    "columns, added up": (lambda x: _summed(_unstacked(tf.transpose(x))), Kind.ROWS),
    "columns, and back": (lambda x: _unstacked(tf.transpose(x)).stack(), Kind.ROWS),
    "some columns": (
        lambda x: _unstacked(tf.transpose(x)).gather([2, 0]),
        Kind.ROWS,
    ),
    "examples, one by one": (lambda x: _unstacked(x).read(0), Kind.UNKNOWN),
    "mean columns": (
        lambda x: _unstacked(tf.reduce_mean(x, 0)).read(0),
        Kind.UNKNOWN,
    ),
    "constants, one by one": (
        lambda x: _array(x, lambda x, k: 2 * tf.ones([2])).read(1),
        Kind.SAME,
    ),
    "two kinds": (
        lambda x: (
            _array(x, lambda x, k: tf.reduce_mean(_scaled(x, k), 0), 2)
            .write(0, tf.reduce_max(x, 0))
            .stack()
        ),
        Kind.UNKNOWN,
    ),
}


@LOOPS
@pytest.mark.parametrize("name", LISTS)
def test_elements_of_lists_are_what_was_written(name: str, is_v1: bool) -> None:
    make, kind = LISTS[name]
    if is_v1:
        with v1_control_flow():
            assert told(make).kind is kind
    else:
        assert told(make).kind is kind


def _turned(x: tf.Tensor, start: Any, turn: Make, count: int = 3) -> tf.Tensor:
    return tf.while_loop(
        lambda k, t: k < count, lambda k, t: (k + 1, turn(t)), (0, start)
    )[1]


TURNS: dict[str, tuple[Make, Kind, float]] = {
    "rows": (lambda x: _turned(x, x, lambda t: 2 * t), Kind.ROWS, 0),
    "sums that are added": (
        lambda x: _turned(x, tf.reduce_sum(x, 0), lambda t: t + tf.reduce_sum(x, 0)),
        *(Kind.MEAN, 1),
    ),
    "a mean from a constant on": (
        lambda x: _turned(x, tf.zeros([3]), lambda t: 2 * t + tf.reduce_mean(x, 0)),
        *(Kind.MEAN, 0),
    ),
    "what is the same": (
        lambda x: _turned(x, tf.ones([3]), lambda t: t * 2) + tf.reduce_mean(x, 0),
        *(Kind.MEAN, 0),
    ),
    "rows that are added to a constant": (
        lambda x: _turned(
            x,
            tf.compat.v1.placeholder_with_default(tf.zeros([1]), None),
            lambda t: t + x,
        ),
        *(Kind.UNKNOWN, 0),
    ),
    "a maximum": (
        lambda x: _turned(
            x, tf.reduce_max(x, 0), lambda t: tf.maximum(t, tf.reduce_max(-x, 0))
        ),
        *(Kind.MAX, 0),
    ),
    "sums of sums": (
        lambda x: _turned(x, tf.reduce_sum(x), lambda t: t * tf.reduce_sum(x)),
        *(Kind.UNKNOWN, 0),
    ),
    "a power of n": (
        lambda x: _turned(
            x, tf.reduce_sum(x), lambda t: t * tf.cast(tf.shape(x)[0], tf.float32)
        ),
        *(Kind.UNKNOWN, 0),
    ),
}


@LOOPS
@pytest.mark.parametrize("name", TURNS)
def test_variables_are_of_the_kind_that_all_turns_keep(name: str, is_v1: bool) -> None:
    make, kind, power = TURNS[name]
    if is_v1:
        with v1_control_flow():
            value = told(make)
    else:
        value = told(make)
    assert (value.kind, value.power) == (kind, power)


def test_an_empty_list_becomes_what_is_put_into_it() -> None:
    for after in (ROWS, MEAN, SAME):
        assert turns.in_turns(SAME, after, True) == after
        assert turns.in_turns(after, after, False) == after
    assert turns.in_turns(SAME, ROWS, False) == UNKNOWN
    assert turns.in_turns(SAME, MEAN, False) == MEAN
    assert turns.in_turns(MAX, MEAN, True) == UNKNOWN


class _Loop:
    """A loop that keeps rows as they are in some variables; others are constants."""

    def keeps(self, k: int) -> bool:
        return k == 0

    def is_constant(self, k: int) -> bool:
        return k == 1


@pytest.mark.parametrize("value", [ROWS, MEAN, SAME], ids=lambda v: v.kind.name)
def test_variables_end_as_they_are_where_more_turns_change_nothing(
    value: Value,
) -> None:
    keeps_rows = value.kind is Kind.ROWS
    assert turns.ended(value, (_Loop(), 0)) == (value if keeps_rows else UNKNOWN)
    assert turns.ended(value, (_Loop(), 1)) == value
    assert turns.ended(value, (_Loop(), 2)) == UNKNOWN
    assert turns.ended(value, None) == UNKNOWN


def _loop() -> tuple[tf.Graph, tf.Tensor]:
    with tf.Graph().as_default() as graph, v1_control_flow():
        x = v1.placeholder(tf.float32, [None, 3], "x")
        test = v1.placeholder(tf.bool, [], "test")
        start = x * tf.cond(test, lambda: tf.ones([3]), lambda: tf.zeros([3]))
        result = _turned(x, start, lambda t: tf.square(t))
    return graph, result


def test_ops_follow_what_they_depend_on_but_for_the_turn_before() -> None:
    graph, result = _loop()
    ops = graph.get_operations()
    control = switching.Flow(ops)
    ordered = turns.ordered(result, lambda op: False, control)
    assert len(ordered) == len(set(ordered))
    seen: set[tf.Operation] = set()
    for op in ordered:
        operands = {t.op for t in op.inputs if t.op.type != "NextIteration"}
        assert operands <= seen
        seen.add(op)
    found = {op.type for op in ordered}
    assert {"Square", "NextIteration", "Merge", "Enter", "LoopCond"} <= found
    # What decides on a branch comes before what is merged.
    names = [op.name for op in ordered]
    merge = next(op for op in ordered if op.type == "Merge" and "cond" in op.name)
    assert names.index("test") < names.index(merge.name)


def test_nothing_is_looked_at_behind_what_is_known() -> None:
    graph, result = _loop()
    control = switching.Flow(graph.get_operations())
    ordered = turns.ordered(result, lambda op: op.type == "Exit", control)
    assert [op.type for op in ordered] == ["Exit"]
