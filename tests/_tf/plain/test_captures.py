# SPDX-License-Identifier: Apache-2.0
"""Resources that are not captured in bulk are captured one by one."""

from __future__ import annotations

import tensorflow as tf

from replicator._tf.plain import captures


def test_capture_all_leaves_it_to_the_graph():
    variables = [tf.Variable([float(k)]) for k in range(3)]

    @tf.function(autograph=False)
    def function():
        graph = tf.compat.v1.get_default_graph()
        captures.capture_all(graph, [(v.handle, "") for v in variables])
        assert not graph.inputs
        return tf.concat([variable.read_value() for variable in variables], 0)

    assert list(function()) == [0.0, 1.0, 2.0]
