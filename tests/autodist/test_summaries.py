# SPDX-License-Identifier: Apache-2.0
"""Summaries of a function are written once, with the values of the whole batch."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist import helpers

X = np.random.default_rng(0).normal(size=[7, 4]).astype(np.float32)


def _written(folder):
    """Returns (tag, step, value) of all summaries, without the tags' scopes."""
    found = []
    for path in sorted(folder.glob("*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                tag = value.tag.rpartition("/")[2]
                found.append((tag, event.step, tf.make_ndarray(value.tensor)))
    return sorted(found, key=lambda one: one[:2])


def _log(way, loss, x, w, step, total):
    def write():
        total.assign_add(tf.reduce_sum(x))
        tf.summary.scalar("loss", loss)
        tf.summary.scalar("root", tf.sqrt(loss))
        tf.summary.scalar("sum", tf.reduce_sum(x))
        tf.summary.scalar("largest", tf.reduce_max(x))
        tf.summary.histogram("w", w)
        if way == "rows":
            tf.summary.histogram("x", x)

    if way == "record_if":
        with tf.summary.record_if(step % 2 == 0):
            write()
    elif way == "branch":
        tf.cond(step % 2 == 0, write, lambda: None)
    elif way == "function":
        tf.function(write)()
    else:
        write()


@pytest.mark.battery(5)
@pytest.mark.parametrize("way", ["plain", "record_if", "branch", "function", "rows"])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_summaries_are_those_of_one_device(tmp_path, way, num_replicas):
    outcomes = []
    for autodist in (None, helpers.make(num_replicas)):
        folder = tmp_path / str(len(outcomes))
        writer = tf.summary.create_file_writer(str(folder))
        with autodist.scope() if autodist else contextlib.nullcontext():
            w = tf.Variable(tf.ones([4]))
            step, total = tf.Variable(0, dtype=tf.int64), tf.Variable(0.0)

        def train(x, w=w, step=step, total=total, writer=writer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x * w - 1.0) ** 2)
            gradient = tape.gradient(loss, w)
            with writer.as_default(step=step):
                _log(way, loss, x, w, step, total)
                tf.summary.scalar("norm", tf.norm(gradient))
            w.assign_sub(0.1 * gradient)
            step.assign_add(1)

        function = autodist.function(train) if autodist else tf.function(train)
        for n in (7, 6, 5):
            function(X[:n])
        writer.flush()
        outcomes.append([*_written(folder), ("written", 0, total.numpy())])
    expected, actual = outcomes
    assert [one[:2] for one in actual] == [one[:2] for one in expected]
    for (tag, *_, a), (*_, b) in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=tag)
