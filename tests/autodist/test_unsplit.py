# SPDX-License-Identifier: Apache-2.0
"""Values that parts of a batch do not determine are computed from all of it."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import replicator
from replicator import strategy
from tests.autodist import helpers
from tests.autodist.programs import examples

v1 = tf.compat.v1
X = examples(6, 3)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *own: texts.append(text % own))
    return texts


def _loss(x: tf.Tensor, w: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.sort(tf.reduce_sum(tf.tanh(x @ w), 1)) ** 2 * x[:, 0])


def _function(autodist: Any) -> Any:
    """Returns the results of steps, some on a tape, and the final variable."""
    with autodist.scope() if autodist else tf.init_scope():
        w = tf.Variable(examples(3, 2))
        optimizer = tf.keras.optimizers.Adam(0.1)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = _loss(x, w)
        by_w, by_x = tape.gradient(loss, [w, x])
        optimizer.apply_gradients([(by_w, w)])
        return loss, by_x, tf.sort(x[:, 0])[1]

    run = autodist.function(step) if autodist else tf.function(step)
    results = []
    for n, around in ((6, contextlib.nullcontext()), (5, tf.GradientTape())):
        with around:
            results.append(run(X[:n]))
    return tf.nest.map_structure(np.asarray, (results, w.numpy()))


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_functions_compute_it_without_a_word(
    num_replicas: int, said: list[str]
) -> None:
    actual = _function(helpers.make(num_replicas, "sharded"))
    helpers.assert_equal(actual, _function(None))
    assert not [text for text in said if "is not split" in text]


def _session(autodist: Any) -> Any:
    with tf.Graph().as_default(), contextlib.ExitStack() as stack:
        if autodist:
            stack.enter_context(autodist.scope())
        x = v1.placeholder(tf.float32, [None, 3])
        w = v1.get_variable("w", initializer=X[:4, :2][:3], use_resource=True)
        loss = _loss(x, w)
        train = v1.train.AdamOptimizer(0.1).minimize(loss)
        if autodist:
            session = autodist.create_distributed_session()
        else:
            session = v1.Session()
            session.run(v1.global_variables_initializer())
        losses = [session.run([loss, train], {x: X[:n]})[0] for n in (6, 5)]
        later = tf.sort(x @ w, 0)
        return [*losses, session.run(later, {x: X[:3]}), session.run(w)]


@pytest.mark.parametrize("plan", ["mirrored", strategy.PartitionedPS()])
def test_sessions_compute_it_and_say_so(plan: Any, said: list[str]) -> None:
    actual = _session(helpers.make(2, plan))
    helpers.assert_equal(actual, _session(None))
    assert [text for text in said if "the batch fed to sessions is not split" in text]


def test_dealt_elements_are_not_there_as_a_whole() -> None:
    with tf.Graph().as_default(), helpers.make(2).scope() as autodist:
        data = tf.data.Dataset.from_tensors(X).repeat()
        x = v1.data.make_one_shot_iterator(data).get_next()
        w = v1.get_variable("w", initializer=X[:3, :2], use_resource=True)
        v1.train.GradientDescentOptimizer(0.1).minimize(_loss(x, w))
        with pytest.raises(
            replicator.UnsupportedError, match=r"(?s)the loss .*test_unsplit\.py:\d+"
        ):
            autodist.create_distributed_session()


def test_gradients_by_what_is_no_variable_are_whole_where_nothing_is_split() -> None:
    autodist = helpers.make(2)
    with autodist.scope():
        w = tf.Variable([1.0, 2.0])

    @autodist.function
    def step() -> Any:
        one = tf.ones([])
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(one)
                loss = tf.reduce_sum((one * w) ** 3)
            by_w, by_one = tape.gradient(loss, [w, one])
            squares = tf.reduce_sum(by_w**2)
        return by_w, by_one, outer.gradient(squares, w)

    by_w, by_one, second = step()
    np.testing.assert_allclose(by_w, [3, 12])
    np.testing.assert_allclose(by_one, 27)
    np.testing.assert_allclose(second, [36, 288])  # of 9 w^4


def test_a_strategy_and_an_option_that_differ_are_refused() -> None:
    with pytest.raises(
        replicator.ArgumentError, match=r"(?s)'mirrored'.*'sharded'.*Fix: pass only"
    ):
        helpers.make(2, "mirrored", variables="sharded")
    assert helpers.make(2, "mirrored", variables="mirrored").replicator.num_replicas
