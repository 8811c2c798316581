# SPDX-License-Identifier: Apache-2.0
"""Programs for one device read and write variables of several components."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import PerReplica, context, strategy
from replicator.variables import whole_values
from replicator.variables.chooser import Description
from replicator.variables.collected import Rows
from tests import helpers

_AGGREGATIONS = {
    "sum": (tf.VariableAggregation.SUM, [1.0, 2.0], 3.0),
    "mean": (tf.VariableAggregation.MEAN, [1.0, 2.0], 1.5),
    "first": (tf.VariableAggregation.ONLY_FIRST_REPLICA, [1.0, 2.0], 1.0),
    "none": (tf.VariableAggregation.NONE, [1.0, 2.0], 1.0),
}


def _on_read(repl: Any, aggregation: tf.VariableAggregation, values: Any) -> Any:
    with repl.context():
        variable = tf.Variable(
            tf.zeros_like(values[0]),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=aggregation,
            shape=tf.TensorShape([None]) if np.ndim(values[0]) else None,
        )
    for component, value in zip(variable.components, values, strict=True):
        component.assign(value)
    return variable


@pytest.mark.parametrize("name", _AGGREGATIONS)
def test_reads_are_the_value_that_is_read_outside_or_summands_of_it(name):
    aggregation, values, whole = _AGGREGATIONS[name]
    repl = helpers.make(2)
    variable = _on_read(repl, aggregation, values)
    read = list(repl.run(lambda: whole_values.read(variable)))
    wanted = values if name == "sum" else [whole, whole]
    np.testing.assert_array_equal(read, wanted)
    assert float(variable.read_value()) == whole


def test_rows_that_replicas_collect_are_read_together_and_written_to_the_first():
    repl = helpers.make(2)
    own = [np.float32([1]), np.float32([2, 3])]
    variable = _on_read(repl, tf.VariableAggregation.NONE, own)
    rows = Rows(tf.VariableAggregation.SUM)
    variable.storage.description = Description(rows)

    def step():
        rows = whole_values.read(variable)
        picked = whole_values.read_rows(variable, [2, 0])
        new = tf.concat([rows, picked], 0)
        variable.assign(whole_values.written(variable, new))
        return rows

    for rows in repl.run(step):
        np.testing.assert_array_equal(rows, [1, 2, 3])
    lengths = [len(component.numpy()) for component in variable.components]
    assert lengths == [5, 0]
    np.testing.assert_array_equal(variable, [1, 2, 3, 3, 1])


@pytest.mark.parametrize("proven", [False, True])
def test_updates_that_are_proven_need_no_message(proven):
    repl = helpers.make(2)
    with repl.context():
        v = tf.Variable(1.0)

    def step(value):
        replica = context.require("a test")
        with replica.equal_updates("a test", proven=proven):
            v.assign_add(value)

    repl.run(step, args=(PerReplica([2.0, 2.0]),))
    assert v.numpy() == 3.0
    assert bool(repl.plan) == (not proven)  # in doubt, the mean


@pytest.mark.parametrize("in_branch", [False, True])
def test_copies_are_refreshed_together_before_they_are_read(in_branch):
    ps = strategy.PS(local_proxy_variable=True)
    repl = replicator.Replicator(["CPU:0", "CPU:1"], strategy=ps)
    with repl.context():
        v, w = tf.Variable([1.0, 2.0]), tf.Variable([3.0])

    def write(writes):
        with writes.writing([v]):
            v.assign_add([1.0, 1.0])
        with writes.writing([w]):
            w.assign_add([1.0])
        writes.refresh()
        return whole_values.read(v) + whole_values.read(w)

    def step():
        writes = whole_values.Writes()
        if in_branch:
            count = tf.reduce_sum(whole_values.read(v))
            return tf.cond(count > 0, lambda: write(writes), lambda: tf.zeros([2]))
        return write(writes)

    for count in range(1, 3):
        for value in repl.run(step):
            np.testing.assert_array_equal(value, [4.0 + 2 * count, 5.0 + 2 * count])
    for variable in (v, w):
        values = [component.numpy() for component in variable.components]
        np.testing.assert_array_equal(values[0], values[1])
    kinds = collections.Counter(row.primitive for row in repl.plan)
    assert in_branch or kinds == {"broadcast": 1}
