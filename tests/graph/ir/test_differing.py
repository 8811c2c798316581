# SPDX-License-Identifier: Apache-2.0
"""Constants that differ between replicas: each copy is given its own value."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator.graph.ir import differing


@pytest.mark.parametrize("values", [[3, -1, 0], [False, True, False]])
def test_a_copy_of_the_node_holds_the_value_of_its_replica(values: list[int]) -> None:
    for made_for in range(3):
        with tf.Graph().as_default() as graph:
            made = differing.constant(values, made_for)
            assert tf.get_static_value(made) == values[made_for]
            (node,) = graph.as_graph_def().node
        for replica_id in range(3):
            assert differing.give(node, replica_id)
            with tf.Graph().as_default() as graph:
                definition = tf.compat.v1.GraphDef(node=[node])
                (copy,) = tf.graph_util.import_graph_def(
                    definition, return_elements=[f"{node.name}:0"], name=""
                )
                assert tf.get_static_value(copy) == values[replica_id]
                assert copy.dtype == made.dtype


def test_constants_of_users_are_left_alone() -> None:
    with tf.Graph().as_default() as graph:
        tf.constant(5)
        (node,) = graph.as_graph_def().node
    before = node.SerializeToString()
    assert not differing.give(node, 1)
    assert node.SerializeToString() == before
