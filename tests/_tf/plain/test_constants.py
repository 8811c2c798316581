# SPDX-License-Identifier: Apache-2.0
"""Constants that nothing replaces keep their values."""

from __future__ import annotations

import tensorflow as tf

from replicator._tf.plain import constants


def test_replace_new_constant_leaves_it():
    def refuse(_):
        raise AssertionError

    with tf.Graph().as_default():
        value = tf.constant([1.0, 2.0])
        constants.replace_new_constant(value.op, refuse)
        tf.identity(value)
    assert list(tf.get_static_value(value)) == [1.0, 2.0]
