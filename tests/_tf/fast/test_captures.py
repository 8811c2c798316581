# SPDX-License-Identifier: Apache-2.0
"""Resources captured in bulk equal others: each private name is called."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator._tf import choice

pytestmark = pytest.mark.fast


def test_capture_all_knows_what_is_captured_later():
    variables = [tf.Variable([float(k)]) for k in range(3)]
    handles = [(variable.handle, "") for variable in variables]

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()
        first = graph.capture(variables[1].handle)
        choice.capture_all(graph, handles)
        count = len(graph.get_operations())
        assert graph.capture(variables[1].handle) is first
        values = [variable.read_value() for variable in variables]
        assert values[0].shape == [1]  # a resource knows its contents
        types = [op.type for op in graph.get_operations()[count:]]
        assert "Placeholder" not in types
        choice.capture_all(graph, handles)
        assert len(graph.captures) == len(graph.inputs) == 3
        return tf.concat(values, 0)

    assert list(function()) == [0.0, 1.0, 2.0]
    variables[2].assign([7.0])
    assert list(function()) == [0.0, 1.0, 7.0]
    variables[0].assign([5.0])
    assert list(tf.function(lambda: function())()) == [5.0, 1.0, 7.0]
