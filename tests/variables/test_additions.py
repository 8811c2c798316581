# SPDX-License-Identifier: Apache-2.0
"""Assignments that add are told from all others, and what they add."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import ArgumentError, strategy
from replicator.variables import additions
from tests import helpers
from tests.writes import optimizers

VALUE = np.array([1.0, 2.0], np.float32)


def _added_to_the_value_before(v: Any, w: Any) -> Any:
    before = v.value()
    v.assign_add(w)
    return before + 1.0


# Of variables v and w: what is assigned to v, and what that adds, if it does.
ASSIGNED: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "a constant behind it": (lambda v, w: v + [3.0, 4.0], [3, 4]),
    "a constant before it": (lambda v, w: 1.0 + v, [1, 1]),
    "by Add": (
        lambda v, w: tf.raw_ops.Add(x=tf.convert_to_tensor(v), y=[5.0, 6.0]),
        [5, 6],
    ),
    "another": (lambda v, w: v + w, [10, 20]),
    "itself": (lambda v, w: v + v.read_value(), [1, 2]),
    "to a read that is passed on": (lambda v, w: v.read_value() + 1.0, [1, 1]),
    "to the value before": (_added_to_the_value_before, None),
    "to another": (lambda v, w: w + 1.0, None),
    "to a multiple": (lambda v, w: 2.0 * v + 1.0, None),
    "less": (lambda v, w: v - 1.0, [-1, -1]),
    "less than a number": (lambda v, w: 1.0 - v, None),
    "the value itself": (lambda v, w: v.read_value(), None),
    "a number": (lambda v, w: 3.0, None),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_what_is_added_is_told_in_the_variables_shape(name: str) -> None:
    make, expected = ASSIGNED[name]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        v, w = tf.Variable(VALUE), tf.Variable(10 * VALUE)
        found = additions.addend(v, make(v, w))
        assert (found is None) == (expected is None)
        if found is not None:
            session.run([v.initializer, w.initializer])
            result = session.run(found)
            assert result.shape == VALUE.shape
            np.testing.assert_array_equal(result, expected)


def test_eager_values_add_nothing_that_is_known() -> None:
    v = tf.Variable(VALUE)
    assert additions.addend(v, v + 1.0) is None


# What is assigned to v, and whether components that are assigned so keep a sum.
KEPT: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "more": (lambda v, w: v + w + 1.0, True),
    "less": (lambda v, w: v - w, True),
    "a share": (lambda v, w: 0.9 * v + 0.1 * w, True),
    "more where it is asked": (lambda v, w: tf.where(w > 15, v + 1.0, v), True),
    "more in a row": (lambda v, w: tf.tensor_scatter_nd_add(v, [[0]], [1.0]), True),
    "zeros": (lambda v, w: tf.zeros([2]), True),
    "a maximum": (lambda v, w: tf.maximum(v, w), False),
    "another": (lambda v, w: w + 1.0, False),
    "ones": (lambda v, w: tf.ones([2]), False),
    # Each op is looked at once: there are 2**40 paths.
    "another, doubled": (
        lambda v, w: functools.reduce(lambda x, _: x + x, range(40), w),
        False,
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_keeps_a_sum_is_told_from_what_does_not(name: str) -> None:
    make, expected = KEPT[name]
    with tf.Graph().as_default():
        v, w = tf.Variable(VALUE), tf.Variable(10 * VALUE)
        assert additions.keeps_sums(v, make(v, w)) is expected


HOW = pytest.mark.parametrize(
    "how", [None, strategy.PartitionedPS()], ids=["whole", "parts"]
)


@HOW
def test_what_is_added_is_summed(how: strategy.Builder | None) -> None:
    repl = helpers.make(2, strategy=how)
    with repl.context():
        v = tf.Variable(VALUE, aggregation=tf.VariableAggregation.SUM)

    def step() -> None:
        v.assign(v + 1.0)
        v.assign(v.read_value() - [1.0, 0.5])

    repl.run(step)
    assert v.numpy().tolist() == [1.0, 3.0]


def _in_a_branch(v: Any) -> None:
    before = v.read_value()
    written = lambda: v.assign(before + 1.0).read_value()  # noqa: E731
    tf.cond(helpers.opaque(True), written, lambda: before)


def _over_the_value_before(v: Any) -> None:
    before = v.value()
    v.assign_add([1.0, 1.0])
    v.assign(before + 1.0)


WHOLES: dict[str, Callable[[Any], Any]] = {
    "decayed": lambda v: v.assign(0.9 * v + 1.0),
    "chosen": lambda v: v.assign(tf.maximum(v, 1.0)),
    "moved on": lambda v: v.assign(tf.concat([v[1:], [1.0]], 0)),
    "in a branch": _in_a_branch,
    "over the value before": _over_the_value_before,
}


@HOW
@pytest.mark.parametrize("name", WHOLES)
def test_wholes_made_of_a_variables_own_value_are_not_summed(
    name: str, how: strategy.Builder | None
) -> None:
    repl = helpers.make(2, strategy=how)
    with repl.context():
        v = tf.Variable(VALUE, aggregation=tf.VariableAggregation.SUM)
    with pytest.raises(ArgumentError, match="(?s)each replica's whole .*assign_add"):
        repl.run(lambda: WHOLES[name](v) and None)
    assert v.numpy().tolist() == VALUE.tolist()


def test_an_optimizer_updates_rows_of_a_variable_that_sums() -> None:
    repl = helpers.make(2)
    with repl.context():
        v = tf.Variable(VALUE, aggregation=tf.VariableAggregation.SUM)
        noisy = repl.wrap_optimizer(optimizers.NoisySonnet())  # by each replica's own
        sgd = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))

    def step() -> None:
        noisy.apply([tf.zeros([2])], [v])
        v.assign(tf.zeros([2]))
        rows = tf.IndexedSlices(tf.ones([1]), tf.constant([1]), tf.constant([2]))
        sgd.apply_gradients([(rows, v)])

    repl.run(step)
    assert v.numpy().tolist() == [0.0, -0.5]
    helpers.assert_replicas_equal([v])
