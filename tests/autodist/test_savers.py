# SPDX-License-Identifier: Apache-2.0
"""Files of a distributed session are those of the single-device graph."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator.strategy import PartitionedPS
from tests.autodist import helpers

v1 = tf.compat.v1


def _build():
    x = v1.placeholder(tf.float32, [None, 3], "x")
    w = v1.get_variable("w", [3, 2])
    y = tf.matmul(x, w, name="y")
    train = v1.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(y**2))
    return x, w, y, train


def _on_one_device(path):
    """Returns the variable and a result of a checkpoint, by plain TensorFlow."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, w, y, _ = _build()
        v1.train.Saver().restore(session, path)
        return session.run([w, y], {x: np.ones([2, 3])})


@pytest.mark.parametrize("strategy", ["mirrored", "sharded", PartitionedPS()])
def test_a_checkpoint_loads_on_one_device_and_on_other_replicas(strategy, tmp_path):
    with tf.Graph().as_default(), (autodist := helpers.make(3, strategy)).scope():
        x, w, y, train = _build()
        saver = v1.train.Saver()
        session = autodist.create_distributed_session()
        session.run(train, {x: np.ones([4, 3])})
        path = saver.save(session, str(tmp_path / "model"))
        expected = session.run([w, y], {x: np.ones([2, 3])})
    names = {name for name, _ in tf.train.list_variables(path)}
    assert names == {"w", "w/Adam", "w/Adam_1", "beta1_power", "beta2_power"}
    for a, b in zip(_on_one_device(path), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    with tf.Graph().as_default(), (autodist := helpers.make(2)).scope():
        x, w, y, train = _build()
        session = autodist.create_distributed_session()
        v1.train.Saver().restore(session, path)  # made after the session
        for a, b in zip(
            session.run([w, y], {x: np.ones([2, 3])}), expected, strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_saved_model_is_that_of_the_single_device_graph(tmp_path):
    with tf.Graph().as_default(), (autodist := helpers.make(2, "sharded")).scope():
        x, _, y, train = _build()
        session = autodist.create_distributed_session()
        session.run(train, {x: np.ones([4, 3])})
        expected = session.run(y, {x: np.ones([2, 3])})
        v1.saved_model.simple_save(session, str(tmp_path / "out"), {"x": x}, {"y": y})
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    actual = loaded.signatures["serving_default"](tf.ones([2, 3]))["y"]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    text = (tmp_path / "out" / "saved_model.pb").read_bytes()
    assert b"replica_0" not in text and b"PyFunc" not in text
