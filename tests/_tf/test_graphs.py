# SPDX-License-Identifier: Apache-2.0
"""Facts about graphs: each private name is called."""

from __future__ import annotations

import tensorflow as tf

from replicator._tf import graphs


def test_operation_count_counts():
    with tf.Graph().as_default() as graph:
        for count in range(3):
            assert graphs.operation_count(graph) == len(graph.get_operations()) == count
            tf.constant(0)


def test_session_config_has_the_devices_of_the_process() -> None:
    config = graphs.session_config()
    assert config.device_count["CPU"] == len(tf.config.list_logical_devices("CPU"))
    config.device_count["CPU"] = 1
    assert graphs.session_config() != config


def test_stands_in_tells_graphs_inside_a_graph() -> None:
    results = []

    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        results.append(graphs.stands_in(graph))
        with tf.init_scope():
            results.append(not graphs.stands_in(graph))

        def branch() -> tf.Tensor:
            results.append(graphs.stands_in(graph))
            results.append(not graphs.stands_in(tf.Graph()))
            return x + 1

        return tf.cond(x > 0, branch, lambda: x)

    function.get_concrete_function(tf.TensorSpec([], tf.float32))
    assert len(results) >= 4 and all(results)


def test_seeds_counted_are_those_without_a_seed_of_their_own() -> None:
    with tf.Graph().as_default() as graph:
        assert graphs.seeds_counted(graph) == 0
        tf.random.set_seed(3)
        tf.random.normal([])
        tf.random.normal([], seed=4)
        tf.random.uniform([])
        assert graphs.seeds_counted(graph) == 2
        graphs.count_seeds_from(graph, 1)
        assert tf.compat.v1.random.get_seed(None) == (3, 1)
