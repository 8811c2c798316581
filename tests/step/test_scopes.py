# SPDX-License-Identifier: Apache-2.0
"""The variable scopes of TensorFlow 1 around a build."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator.step import scopes
from tests import helpers

v1 = tf.compat.v1


def test_the_caching_device_is_as_before_whatever_happens_inside() -> None:
    with tf.Graph().as_default():
        with pytest.raises(KeyError), scopes.kept_caching_device():
            v1.get_variable_scope().set_caching_device("CPU:1")
            raise KeyError
        assert v1.get_variable_scope().caching_device is None


def test_all_replicas_find_the_variable_of_the_first_by_its_name() -> None:
    repl = helpers.make(3)
    with tf.Graph().as_default():

        def step() -> tf.Tensor:
            return v1.get_variable("weights", [], initializer=v1.ones_initializer()) * 2

        doubled = repl.run(step)
        assert [v.op.name for v in v1.global_variables()] == ["weights"]
        with pytest.raises(ValueError, match="already exists"):
            v1.get_variable("weights", [])  # reuse ends with the step
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            assert session.run(list(doubled)) == [2.0, 2.0, 2.0]
