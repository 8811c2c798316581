# SPDX-License-Identifier: Apache-2.0
"""States of recurrent layers, whose rows belong to examples: refused, or kept."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_states_of_stateful_rnns_are_refused(package: str) -> None:
    """Their rows belong to examples, of which each replica has others."""
    layers = pytest.importorskip(package).layers
    repl = helpers.make(2)
    with repl.context():
        rnn = layers.LSTM(3, stateful=True)
        rnn.build((2, 5, 1))
        if package == "tf_keras":
            rnn.reset_states()
    with pytest.raises(errors.UnsupportedError, match="(?s)stateful.*ON_READ"):
        repl.run(lambda x: rnn(x), tf.ones([4, 5, 1]), input_mode="global_batch")


def test_states_of_rnns_may_be_kept_per_replica() -> None:
    """This is what the refusal above suggests: it equals one device."""
    repl = helpers.make(2)
    with repl.context():
        rnn = tf.keras.layers.LSTM(3, return_state=True)
        rnn.build((2, 5, 1))
        states = [
            tf.Variable(
                tf.zeros([2, 3]),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
            )
            for _ in range(2)
        ]
    x = tf.random.stateless_normal([4, 5, 1], seed=[1, 2])
    plain = tf.keras.layers.LSTM(3, stateful=True)
    plain.build((4, 5, 1))
    plain.cell.set_weights(rnn.cell.get_weights())

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        out, *new = rnn(x, initial_state=[tf.convert_to_tensor(s) for s in states])
        for state, value in zip(states, new, strict=True):
            state.assign(value)
        return out

    for _ in range(2):
        out = tf.concat(list(repl.run(step_fn, x, input_mode="global_batch")), 0)
        np.testing.assert_allclose(out, plain(x), atol=1e-6)
