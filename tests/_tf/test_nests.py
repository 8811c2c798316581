# SPDX-License-Identifier: Apache-2.0
"""Tuples of a class of their own stay so in functions."""

from __future__ import annotations

import tensorflow as tf

from replicator._tf import nests


class Row(tuple):
    """A tuple that functions keep; it is made from a plain one."""

    def __tf_tracing_type__(self, context):
        return nests.TupleType.of(self, context)


class Column(Row):
    pass


def test_functions_take_and_return_the_class():
    taken = []

    @tf.function
    def function(value):
        taken.append(type(value))
        return {"x": [value]}

    for given in (Row((1.0, tf.ones([2]))), (1.0, tf.ones([2])), Column((1.0,))):
        (returned,) = function(given)["x"]
        assert type(returned) is type(given)
        tf.nest.map_structure(tf.debugging.assert_equal, tuple(returned), tuple(given))
    assert taken == [Row, tuple, Column]


def test_shapes_are_relaxed_as_for_plain_tuples():
    counts = []
    for kind in (Row, tuple):
        function = tf.function(lambda value: value[0] + 1.0, reduce_retracing=True)
        for size in range(1, 6):
            function(kind((tf.ones([size]),)))
        counts.append(function.experimental_get_tracing_count())
    assert counts[0] == counts[1] < 5


def test_a_saved_function_takes_plain_tuples(tmp_path):
    module = tf.Module()
    module.function = tf.function(lambda value: value[0] + value[1])
    module.function(Row((tf.constant(1.0), tf.constant(2.0))))
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert float(loaded.function((tf.constant(1.0), tf.constant(2.0)))) == 3.0
