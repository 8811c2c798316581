"""Constants that nothing replaces stay what they are."""

from __future__ import annotations

import tensorflow as tf

from replicator._tf.plain import constants


def test_replacing_constants_leaves_them():
    def refuse(_):
        raise AssertionError

    with tf.Graph().as_default(), constants.replacing_constants(refuse, refuse):
        value = tf.constant([1.0, 2.0])
    assert list(tf.get_static_value(value)) == [1.0, 2.0]
