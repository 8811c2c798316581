# SPDX-License-Identifier: Apache-2.0
"""A scope is for one program, and for the session that runs it."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import replicator
from tests.autodist import helpers
from tests.autodist.test_session import scope
from tests.helpers import v1_control_flow

v1 = tf.compat.v1


def test_scopes_are_not_nested_and_sessions_are_made_in_one():
    with scope(2) as autodist:
        with pytest.raises(
            replicator.ContextError, match=r"(?s)inside another scope.*Fix"
        ):
            with autodist.scope():
                pass
        with tf.Graph().as_default():  # another one
            with pytest.raises(
                replicator.ContextError, match=r"(?s)outside of a scope.*Fix"
            ):
                autodist.create_distributed_session()
    with pytest.raises(replicator.ContextError, match=r"(?s)outside of a scope.*Fix"):
        autodist.create_distributed_session()
    with pytest.raises(replicator.ClusterError, match=r"(?s)nowhere.yml.*Fix"):
        replicator.AutoDist("nowhere.yml")
    with pytest.raises(replicator.ArgumentError, match=r"(?s)'some'.*Fix"):
        replicator.AutoDist(["CPU:0"], "some")


def test_scopes_follow_one_another():
    autodist = helpers.make(2)
    for factor in (2.0, 3.0):
        with tf.Graph().as_default(), autodist.scope():
            x = v1.placeholder(tf.float32, [None])
            session = autodist.create_distributed_session()
            assert session.run(x * factor, {x: [1.0, 2.0]}).tolist() == [
                factor,
                2 * factor,
            ]


def test_a_session_outlives_its_scope():
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None])
        w = tf.Variable(2.0)
        session = autodist.create_distributed_session()
        session.run(w)
    with session.graph.as_default():
        total = tf.reduce_sum(w * x)  # built behind it
    assert session.run(total, {x: [1.0, 2.0, 6.0]}) == 18


def test_control_flow_that_was_built_outside_is_refused_by_its_line():
    with v1_control_flow(), tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None], "x")
        found = tf.cond(tf.size(x) > 2, lambda: x * 2.0, lambda: x)
        with (autodist := helpers.make(2)).scope():
            session = autodist.create_distributed_session()
            with pytest.raises(
                replicator.UnsupportedError,
                match=r"(?s)(Merge|Switch) .*test_autodist\.py:\d+ in .*Fix: build it",
            ):
                session.run(found, {x: [1.0, 2.0, 3.0]})


def test_variables_tables_and_iterators_begin_unless_they_are_fed():
    with scope(2) as autodist:
        rows = v1.placeholder(tf.float32, [None])
        data = tf.data.Dataset.from_tensor_slices
        first, fed = map(
            v1.data.make_initializable_iterator, (data(np.float32([1, 2])), data(rows))
        )
        keys = tf.lookup.KeyValueTensorInitializer([1], [2])
        table = tf.lookup.StaticHashTable(keys, 0)
        w = tf.Variable(3.0)
        x, y = first.get_next(), fed.get_next()
        session = autodist.create_distributed_session()
        assert session.run([w, x, table.lookup(tf.cast(x, tf.int32))]) == [3, 1, 2]
        with pytest.raises(tf.errors.FailedPreconditionError):
            session.run(y)
        session.run(fed.initializer, {rows: [4.0]})
        assert session.run([w, y]) == [3, 4]


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_what_a_loss_is_said_to_be_changes_nothing(loss):
    def run(begin):
        x = v1.placeholder(tf.float32, [None, 2])
        w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
        value = tf.reduce_sum(x @ w) / (1.0 + tf.reduce_sum(x**2))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(value)
        with pytest.warns(DeprecationWarning, match="loss= of AutoDist.create_dist"):
            session = begin(loss=loss)
        feed = {x: np.arange(10.0).reshape(5, 2)}
        return [session.run([value, train], feed)[0], session.run(w)]

    found = []
    for count in (1, 2, 3):
        with scope(count) as autodist:
            found.append(run(autodist.create_distributed_session))
    for one in found[1:]:
        helpers.assert_equal(one, found[0])


def test_another_word_for_a_loss_is_refused():
    with scope(2) as autodist:
        with pytest.raises(replicator.ArgumentError, match=r"(?s)loss='some'.*Fix"):
            autodist.create_distributed_session(loss="some")


def test_parts_of_a_run_are_refused():
    with scope(2) as autodist:
        session = autodist.create_distributed_session()
        for name in ("partial_run_setup", "partial_run"):
            with pytest.raises(replicator.UnsupportedError, match=f"(?s){name}.*Fix"):
                getattr(session, name)([])


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *own: texts.append(text % own))
    return texts


def test_a_program_that_runs_on_one_device_is_warned_of(said):
    with tf.Graph().as_default(), helpers.make(2).scope():
        w = tf.Variable(1.0)
        with v1.Session() as session:
            session.run(w.initializer)
            assert session.run(w) == 1
    (text,) = said
    assert "one device only" in text and "test_autodist.py" in text
    assert "create_distributed_session" in text and "session_creator" in text


def test_no_other_scope_is_warned_of(said):
    with scope(2) as autodist:
        tf.Variable(1.0)
        autodist.create_distributed_session()
    with scope(2):  # without variables
        tf.constant(1.0)
    with pytest.raises(KeyError), scope(2):
        tf.Variable(1.0)
        raise KeyError
    with helpers.make(2).scope():  # eagerly
        tf.Variable(1.0)
    assert not said


def test_sessions_are_refused_where_programs_share_variables(monkeypatch):
    autodist = helpers.make(2)
    shared = dataclasses.replace(autodist.replicator._settings, clock=mock.Mock())
    monkeypatch.setattr(autodist.replicator, "_settings", shared)
    with tf.Graph().as_default(), autodist.scope():
        with pytest.raises(
            replicator.ContextError, match="(?s)asynchronous.*=async; or"
        ):
            autodist.create_distributed_session()
