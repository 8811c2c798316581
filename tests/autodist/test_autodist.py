# SPDX-License-Identifier: Apache-2.0
"""A scope is for one program, and for the session that runs it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tests.autodist import helpers
from tests.autodist.helpers import scope

v1 = tf.compat.v1


def test_scopes_follow_one_another() -> None:
    autodist = helpers.make(2)
    for factor in (2.0, 3.0):
        with tf.Graph().as_default(), autodist.scope():
            x = v1.placeholder(tf.float32, [None])
            session = autodist.create_distributed_session()
            found = session.run(x * factor, {x: [1.0, 2.0]})
            assert found.tolist() == [factor, 2 * factor]


def test_a_session_outlives_its_scope() -> None:
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None])
        w = tf.Variable(2.0)
        session = autodist.create_distributed_session()
        session.run(w)
    with session.graph.as_default():
        total = tf.reduce_sum(w * x)  # built behind it
    assert session.run(total, {x: [1.0, 2.0, 6.0]}) == 18


def test_what_is_said_of_a_loss_is_deprecated_and_changes_nothing() -> None:
    with scope(2) as autodist:
        with pytest.warns(DeprecationWarning, match="loss= of AutoDist.create_dist"):
            autodist.create_distributed_session(loss="mean")
    with pytest.warns(DeprecationWarning, match=r"loss= of AutoDist\.function"):
        mean = helpers.make(3).function(tf.reduce_mean, loss="sum")
    assert mean(np.float32([1, 2, 3, 6])) == 3


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *own: texts.append(text % own))
    return texts


def test_a_program_that_runs_on_one_device_is_warned_of(said: list[str]) -> None:
    with tf.Graph().as_default(), helpers.make(2).scope():
        w = tf.Variable(1.0)
        with v1.Session() as session:
            session.run(w.initializer)
            assert session.run(w) == 1
    (text,) = said
    assert "one device only" in text and "test_autodist.py" in text
    assert "create_distributed_session" in text and "session_creator" in text


def test_no_other_scope_is_warned_of(said: list[str]) -> None:
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
