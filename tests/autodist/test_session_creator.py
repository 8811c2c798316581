# SPDX-License-Identifier: Apache-2.0
"""A MonitoredSession, with its hooks, runs on all replicas as on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests.autodist import helpers

v1 = tf.compat.v1
X = np.arange(14, dtype=np.float32).reshape(7, 2)


def _creator(autodist: Any, **options: Any) -> Any:
    """Returns a session creator: TensorFlow's own, if there is no AutoDist."""
    if autodist is not None:
        return autodist.session_creator(**options)
    return v1.train.ChiefSessionCreator(**options)


def _on_each(program: Any, *num_replicas: int) -> list[Any]:
    """Returns what a program gives on one device, and on numbers of replicas."""
    with tf.Graph().as_default():
        found = [program(None)]
    for count in num_replicas:
        with tf.Graph().as_default(), helpers.make(count).scope() as autodist:
            found.append(program(autodist))
    return found


def _trained(**names: Any) -> tuple[Any, ...]:
    x = v1.placeholder(tf.float32, [None, 2])
    w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
    step = v1.train.get_or_create_global_step()
    loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
    train = v1.train.AdamOptimizer(0.1).minimize(loss, step)
    return x, w, loss, train


def test_hooks_stop_it_and_see_what_is_fetched():
    def program(autodist):
        x, w, loss, train = _trained()

        class Noting(v1.train.SessionRunHook):
            def before_run(self, context):
                return v1.train.SessionRunArgs({"loss": loss, "rows": x})

            def after_run(self, context, values):
                seen.append((values.results["loss"], values.results["rows"].shape))

            def end(self, session):
                seen.append(session.run(w))

        seen: list[Any] = []
        hooks = [
            v1.train.StopAtStepHook(num_steps=3),
            v1.train.NanTensorHook(loss),
            Noting(),
        ]
        with v1.train.MonitoredSession(_creator(autodist), hooks) as session:
            while not session.should_stop():
                session.run(train, {x: X})
        return seen

    expected, *others = _on_each(program, 1, 2, 3)
    assert len(expected) == 4
    for actual in others:
        helpers.assert_equal(actual, expected)


def test_it_goes_on_from_the_newest_checkpoint(tmp_path):
    def program(autodist):
        x, _, loss, train = _trained()
        folder = str(tmp_path / str(autodist and autodist.replicator.num_replicas))
        creator = _creator(autodist, checkpoint_dir=folder)
        hooks = [v1.train.CheckpointSaverHook(folder, save_steps=1)]
        with v1.train.MonitoredSession(creator, hooks) as session:
            return [session.run([loss, train], {x: X})[0] for _ in range(2)]

    begun, gone_on = (_on_each(program, 2, 3) for _ in range(2))
    for actual in zip(begun[1:], gone_on[1:], strict=True):
        helpers.assert_equal(actual, (begun[0], gone_on[0]))


def test_a_scaffold_says_what_begins_and_how():
    def program(autodist):
        w, late = (v1.get_variable(name, initializer=1.0) for name in ("w", "late"))
        given = v1.placeholder(tf.float32, [])
        local = v1.get_variable(
            "local", initializer=2.0, collections=[v1.GraphKeys.LOCAL_VARIABLES]
        )
        scaffold = v1.train.Scaffold(
            init_op=tf.group(v1.global_variables_initializer()),
            init_feed_dict={given: 5.0},
            init_fn=lambda scaffold, session: session.run(write, {given: 7.0}),
        )
        write = late.assign(given).op
        creator = _creator(autodist, scaffold=scaffold)
        with v1.train.MonitoredSession(creator) as session:
            return session.run([w, late, local])

    for found in _on_each(program, 1, 2):
        assert found == [1, 7, 2]


def test_a_config_that_is_none_is_refused():
    with tf.Graph().as_default(), helpers.make(2).scope() as autodist:
        creator = autodist.session_creator("no")
        with pytest.raises(replicator.ArgumentError, match="(?s)config='no'.*Fix"):
            creator.create_session()
