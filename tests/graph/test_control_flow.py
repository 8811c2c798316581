"""What counts as inside control flow; tests/conformance asks every primitive."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator import errors
from replicator.graph import control_flow


def _refuse(graph: tf.Graph, built: tf.Graph) -> None:
    control_flow.refuse_nested(graph, built, "all_reduce on replica 3", "train.py:9")


def test_the_top_level_of_the_step_is_fine() -> None:
    with tf.Graph().as_default() as graph:
        _refuse(graph, graph)


def test_another_graph_is_refused_by_its_name() -> None:
    with tf.Graph().as_default() as graph:
        body = tf.function(lambda: tf.constant(1)).get_concrete_function().graph
        with pytest.raises(
            errors.ReplicatorError,
            match=rf"(?s)^all_reduce on replica 3 stands inside control flow .*"
            rf"\({body.name}\).*at train.py:9\nFix: ",
        ):
            _refuse(body, graph)


def test_control_flow_of_v1_is_refused() -> None:
    said = []

    def branch() -> tf.Tensor:
        with pytest.raises(errors.ReplicatorError, match="conditional") as caught:
            _refuse(graph, graph)
        said.append(caught.value)
        return tf.constant(1)

    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            tf.compat.v1.cond(tf.constant(True), branch, lambda: tf.constant(2))
            _refuse(graph, graph)  # after it, all is well
    finally:
        tf.compat.v1.enable_control_flow_v2()
    assert said


def test_a_place_where_ops_run_at_once_is_refused() -> None:
    graph = tf.compat.v1.get_default_graph()
    with pytest.raises(errors.ReplicatorError, match=r"\(tf.init_scope\)"):
        _refuse(graph, graph)
