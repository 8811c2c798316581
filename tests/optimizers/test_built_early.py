# SPDX-License-Identifier: Apache-2.0
"""Keras optimizers that are built before a step, and outside of the context."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from replicator.variables.replicated import ReplicatedVariable, plain
from tests import helpers


def test_slots_of_replicated_variables_are_replicated() -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = keras.Variable([1.0, 2.0])
        optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer.build([variable])
    slots = [plain(v) for v in optimizer.variables]
    assert all(isinstance(v, ReplicatedVariable) for v in slots)

    def step_fn() -> None:
        optimizer.apply([tf.constant([1.0, 1.0])], [variable])

    repl.run(step_fn)
    np.testing.assert_allclose(variable, [0.9, 1.9])


def test_slots_of_plain_variables_are_plain() -> None:
    with (repl := helpers.make(2)).context():
        optimizer = repl.wrap_optimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    variable = keras.Variable([1.0, 2.0])
    before = len(optimizer.variables)
    optimizer.build([variable])
    for slot in optimizer.variables[before:]:
        assert not isinstance(plain(slot), ReplicatedVariable)
