# SPDX-License-Identifier: Apache-2.0
"""Values that reach a variable from outside a step are complete or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import replicator
from tests import helpers

v1 = tf.compat.v1


@pytest.mark.parametrize("mode", helpers.MODES)
def test_gradients_taken_around_a_step_are_whole_or_refused(mode: str) -> None:
    repl = helpers.make(2)

    def whole() -> Any:
        with repl.context():
            variable = tf.Variable(3.0)

        def step() -> tf.Tensor:
            return variable**2

        if mode == "session":
            return tf.gradients(tf.add_n(repl.run(step)), variable)[0]

        def around() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n(repl.run(step))
            return tape.gradient(loss, variable)

        return tf.function(around)() if mode == "function" else around()

    try:
        if mode == "session":
            with tf.Graph().as_default(), v1.Session() as session:
                gradient = whole()
                session.run(v1.global_variables_initializer())
                gradient = None if gradient is None else session.run(gradient)
        else:
            gradient = whole()
    except replicator.ContextError as error:
        assert "gradient" in str(error)
    else:
        assert (
            gradient is None or float(gradient) == 12.0
        )  # 2 x 3 on each of 2 replicas


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "plain"])
@pytest.mark.parametrize(
    "family", ["v1", "keras", "legacy", "compiled", "older", "sonnet"]
)
@pytest.mark.parametrize("how", ["eager", "function"])
def test_updates_outside_a_step_reach_every_replica_or_are_refused(
    how: str, family: str, wrapped: bool
) -> None:
    repl = helpers.make(2, variables="mirrored")
    with repl.context():
        variable = tf.Variable([1.0, 2.0])
        if family == "v1":
            optimizer = v1.train.MomentumOptimizer(0.5, 0.9)
        elif family == "keras":
            optimizer = tf.keras.optimizers.SGD(0.5, momentum=0.9)
        elif family in ("legacy", "compiled"):
            optimizer = tf_keras.optimizers.Adam(0.5)
            if family == "compiled":  # the default where there are GPUs
                optimizer.jit_compile = True
        elif family == "older":
            optimizer = tf_keras.optimizers.legacy.Adam(0.5)
        else:
            sonnet = pytest.importorskip("sonnet")
            optimizer = sonnet.optimizers.Momentum(0.5, 0.9)
        if wrapped:
            optimizer = repl.wrap_optimizer(optimizer)

        def update() -> None:
            gradient = tf.ones([2])
            if family == "sonnet":
                optimizer.apply([gradient], [variable])
            else:
                optimizer.apply_gradients([(gradient, variable)])

        try:
            (tf.function(update) if how == "function" else update)()
        except replicator.ReplicatorError as error:
            assert "Fix:" in str(error)
            assert family in ("v1", "older") or family == "compiled" and not wrapped
    helpers.assert_replicas_equal([variable])
    assert np.isfinite(variable.numpy()).all()


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("sync", ["NONE", "ON_READ"])
def test_counting_up_reaches_every_replica(sync: str, mode: str) -> None:
    repl = helpers.make(2)

    def made() -> tf.Variable:
        how = getattr(tf.VariableSynchronization, sync)
        with repl.context():
            return tf.Variable(
                0, synchronization=how, aggregation=tf.VariableAggregation.SUM
            )

    if mode == "session":
        with tf.Graph().as_default(), v1.Session() as session:
            variable = made()
            count = variable.count_up_to(2)
            session.run(v1.global_variables_initializer())
            assert [session.run(count) for _ in range(2)] == [0, 1]
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(count)
            assert session.run(variable.read_value()) == 2
        return
    variable = made()
    count = variable.count_up_to
    if mode == "function":
        count = tf.function(lambda limit: variable.count_up_to(limit))
    assert [int(count(2)) for _ in range(2)] == [0, 1]
    with pytest.raises(tf.errors.OutOfRangeError):
        count(2)
    assert variable.numpy() == 2
    if sync == "NONE":
        helpers.assert_replicas_equal([variable])
        assert [int(x) for x in repl.run(lambda: variable.count_up_to(9))] == [2, 2]


def test_counting_up_by_v1_is_refused_outside_a_step() -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(0)
    with pytest.raises(replicator.ContextError, match="own method count_up_to"):
        v1.count_up_to(variable, 2)
    assert [int(x) for x in repl.run(lambda: v1.count_up_to(variable, 2))] == [0, 0]
    alone = helpers.make(1)
    with alone.context():
        variable = tf.Variable(0)
    assert int(v1.count_up_to(variable, 2)) == 0
