# SPDX-License-Identifier: Apache-2.0
"""Writes under a name scope that is taken as a name, as moving averages make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from replicator import strategy
from tests import helpers
from tests.variables.writes import START

_SLICES = tf.IndexedSlices([5.0], [1])
_WRITES: dict[str, Callable[[Any, str], Any]] = {
    "assign": lambda v, name: v.assign(START * 2, name=name),
    "assign_add": lambda v, name: v.assign_add(START, name=name),
    "assign_sub": lambda v, name: v.assign_sub(START, name=name),
    "scatter_add": lambda v, name: v.scatter_add(_SLICES, name=name),
    "scatter_mul": lambda v, name: v.scatter_mul(_SLICES, False, name),
    "batch": lambda v, name: v.batch_scatter_update(_SLICES, name=name),
    "scatter_nd_add": lambda v, name: v.scatter_nd_add([[1]], [5.0], name),
    "slice": lambda v, name: v[1:2].assign([5.0], name=name),
    "v1": lambda v, name: tf.compat.v1.assign_sub(v, START, name=name),
}
_PLACES: dict[str, dict[str, Any]] = {
    "mirrored": {"variables": "mirrored"},
    "sharded": {"variables": "sharded"},
    "parts": {"strategy": strategy.PartitionedPS()},
    "copies": {"strategy": strategy.PS(local_proxy_variable=True)},
    "on_read": {"variables": "mirrored"},
}


def _written(v: Any, name: str) -> None:
    with tf.name_scope("Update") as scope:
        _WRITES[name](v, scope)


def _variable(repl: Any, place: str) -> Any:
    facts: dict[str, Any] = {}
    if place == "on_read":
        facts["synchronization"] = tf.VariableSynchronization.ON_READ
        facts["aggregation"] = tf.VariableAggregation.MEAN
    with repl.context():
        return tf.Variable(START, **facts)


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", list(_WRITES))
@pytest.mark.parametrize("place", list(_PLACES))
def test_writes_named_by_their_scope(place: str, name: str) -> None:
    plain = tf.Variable(START)
    tf.function(_written)(plain, name)
    repl = helpers.make(2, **_PLACES[place])
    outside, inside = _variable(repl, place), _variable(repl, place)
    tf.function(_written)(outside, name)
    repl.run(lambda: _written(inside, name))
    for v in (outside, inside):
        np.testing.assert_array_equal(v, plain)


@pytest.mark.parametrize("place", ["mirrored", "sharded"])
def test_writes_named_by_their_scope_in_a_session(place: str) -> None:
    repl = helpers.make(2, **_PLACES[place])
    with tf.Graph().as_default(), helpers.session() as session:
        v = _variable(repl, place)
        with tf.name_scope("Update") as scope:
            write = v.assign_add(START, name=scope)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(write)
        np.testing.assert_array_equal(session.run(list(v.components)), [START * 2] * 2)


def test_a_layer_of_tf_keras_moves_its_averages_outside_of_steps() -> None:
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    plain = tf_keras.layers.BatchNormalization()
    with helpers.make(2, variables="mirrored").context():
        layer = tf_keras.layers.BatchNormalization()
        layer.build(x.shape)
    tf.function(plain)(x, training=True)
    tf.function(layer)(x, training=True)
    for one, other in zip(layer.variables, plain.variables, strict=True):
        for component in one.components:
            np.testing.assert_array_equal(component, other)
