# SPDX-License-Identifier: Apache-2.0
"""The agreed values that replicas assign; variables/ tests whole writes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator import context, errors
from replicator.variables import agreement
from tests import helpers

A = tf.VariableAggregation
VALUES = np.array([[1.0, 8.0], [2.0, 4.0], [6.0, 6.0]], np.float32)


def _agreed(
    aggregation: A, dtype: tf.DType, updating: bool = False
) -> list[np.ndarray]:
    """Returns the values that three replicas assign."""
    repl = helpers.make(3, build="trace")  # which each replica is, is asked inside
    with repl.context():
        variable = tf.Variable(tf.zeros([2], dtype), aggregation=aggregation)

    def step() -> tf.Tensor:
        replica = context.require("test")
        own = tf.cast(tf.gather(VALUES, replica.replica_id), dtype)
        if updating:
            with replica.equal_updates():
                return agreement.agree(variable, own, replica)
        return agreement.agree(variable, own, replica)

    return [value.numpy() for value in repl.run(step)]


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (A.NONE, VALUES.sum(0) / 3),
        (A.MEAN, VALUES.sum(0) / 3),
        (A.SUM, VALUES.sum(0)),
        (A.ONLY_FIRST_REPLICA, VALUES[0]),
    ],
    ids=["none", "mean", "sum", "first"],
)
def test_floats_are_aggregated_as_the_variable_asks(aggregation, expected) -> None:
    for value in _agreed(aggregation, tf.float32):
        np.testing.assert_array_equal(value, expected)


def test_integers_without_an_aggregation_are_taken_as_equal() -> None:
    np.testing.assert_array_equal(_agreed(A.NONE, tf.int32), VALUES.astype(np.int32))


def test_updates_that_are_equal_by_construction_pass_unchanged() -> None:
    np.testing.assert_array_equal(_agreed(A.SUM, tf.float32, updating=True), VALUES)


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
