# SPDX-License-Identifier: Apache-2.0
"""No fast reads or writes: variables do it themselves."""

from __future__ import annotations

import tensorflow as tf

from replicator._tf.plain import variables


def test_variables_are_left_to_themselves():
    variable = tf.Variable(1.0)

    @tf.function(autograph=False)
    def function():
        assert variables.read_quickly(variable) is None
        assert variables.write_quickly(variable, "assign", 2.0, None) is None
        assert variables.place_of_reads() is None

    function()
    assert float(variable) == 1.0
