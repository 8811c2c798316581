# SPDX-License-Identifier: Apache-2.0
"""A sketch of a graph covers all of its ops, and the tensors between its devices."""

from __future__ import annotations

import tensorflow as tf

from replicator.stages import sketch
from replicator.stages.sketch import ANYWHERE, Block


def test_every_op_is_in_one_block() -> None:
    with tf.Graph().as_default() as graph:
        with tf.device("CPU:0"), tf.name_scope("replica_0"):
            x = tf.constant(1.0, name="dense/x")
            tf.identity(x, name="dense_1/y")
            with tf.control_dependencies([x]):
                z = tf.identity(x, name="z")
        with tf.device("CPU:1"), tf.name_scope("replica_1"):
            w = tf.add(x, z, name="dense/w")
        tf.identity(w, name="last")
    drawing = sketch.of(graph.as_graph_def())
    assert drawing.blocks == (
        Block("CPU:0", "dense", 2),
        Block("CPU:0", "z", 1),
        Block("CPU:1", "dense", 1),
        Block(ANYWHERE, "last", 1),
    )
    assert drawing.links == ((0, 2, 1), (1, 2, 1))
    assert drawing.devices == ("CPU:0", "CPU:1", ANYWHERE)


def test_devices_of_several_hosts_have_their_tasks() -> None:
    with tf.Graph().as_default() as graph:
        for task in (0, 1):
            with tf.device(f"/job:worker/task:{task}/device:CPU:0"):
                tf.constant(1.0)
    devices = sketch.of(graph.as_graph_def()).devices
    assert devices == ("worker:0 CPU:0", "worker:1 CPU:0")


def test_a_graph_without_ops() -> None:
    assert sketch.of(tf.compat.v1.GraphDef()) == sketch.Sketch((), ())
