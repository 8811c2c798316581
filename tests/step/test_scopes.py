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
        with pytest.raises(KeyError), scopes.restored_caching_device():
            v1.get_variable_scope().set_caching_device("CPU:1")
            raise KeyError
        assert v1.get_variable_scope().caching_device is None


@pytest.mark.battery(3)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("in_function", [False, True])
def test_a_step_collects_its_own_losses_and_updates(
    in_function: bool, num_replicas: int
) -> None:
    """As programs of TensorFlow 1 do; l = |5 - w| + 3 w^2 + (1 - 2 w)^2."""
    repl = helpers.make(num_replicas)
    with tf.Graph().as_default() as graph:
        with repl.context():
            sgd = v1.train.GradientDescentOptimizer(0.1)
            optimizer = repl.wrap_optimizer(sgd)

        def step() -> tuple[tf.Tensor, int]:
            with v1.variable_scope("net", reuse=v1.AUTO_REUSE):
                weight = v1.get_variable(
                    "weight", initializer=1.0, regularizer=lambda w: 3.0 * w * w
                )
                mean = v1.get_variable("mean", initializer=0.0, trainable=False)
            update = mean.assign(0.9 * mean + 0.1 * weight)
            v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
            v1.losses.mean_squared_error([1.0], [2.0 * weight])
            v1.losses.absolute_difference([5.0], [weight])
            loss = v1.losses.get_total_loss()
            assert len(v1.get_collection(v1.GraphKeys.UPDATE_OPS)) == 1
            with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
                train = optimizer.minimize(loss)
            with tf.control_dependencies([train]):
                return tf.identity(loss)

        losses = repl.run(tf.function(step) if in_function else step)
        with helpers.monitored_session() as session:
            assert list(session.run(losses)) == [8.0] * num_replicas
            variables = session.run({v.op.name: v for v in v1.global_variables()})
        assert variables == pytest.approx({"net/weight": 0.1, "net/mean": 0.1})
        if not in_function:  # outside, they are all there, as without replicas
            assert len(v1.losses.get_losses()) == 2 * num_replicas
            collected = graph.get_collection(v1.GraphKeys.UPDATE_OPS)
            assert len(collected) == num_replicas


def test_summaries_are_written_by_the_first_replica() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():

        def step() -> tf.Tensor:
            v1.summary.scalar("loss", tf.constant(1.0) + repl.replica_id)
            return v1.summary.merge_all()

        merged = repl.run(step)
        with v1.Session() as session:
            first, second = session.run(merged)
    (summary,) = v1.Summary.FromString(first).value
    assert summary.simple_value == 1.0 and second == b""


def test_what_a_failed_step_collected_is_dropped() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():

        def step(fail: bool) -> tf.Tensor:
            v1.losses.add_loss(tf.constant(1.0) * 2.0)
            if fail and repl.replica_id == 1:
                raise KeyError
            return v1.losses.get_total_loss()

        with pytest.raises(KeyError):
            repl.run(lambda: step(True))
        assert len(v1.losses.get_losses()) == 0
        losses = repl.run(lambda: step(False))
        assert len(v1.losses.get_losses()) == 2
        with v1.Session() as session:
            assert list(session.run(losses)) == [2.0, 2.0]


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
