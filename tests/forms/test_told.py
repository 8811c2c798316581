# SPDX-License-Identifier: Apache-2.0
"""Users are told of gathers that cost much, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tests.autodist import helpers

ROWS = np.ones([200_000, 3], np.float32)


@pytest.mark.parametrize("rows, expected", [(200_000, 1), (1_000, 0)])
def test_a_costly_gather_is_said_once_with_its_line(rows, expected, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *own: said.append(text % own))

    @helpers.make(2).function
    def median(x):
        return tf.sort(x * 2.0, 0)[tf.shape(x)[0] // 2, 0]

    for n in (rows, rows - 1, 1):
        assert float(median(ROWS[:n])) == 2
    assert len(said) == expected
    assert all("2.3 MiB" in text and "test_told.py:" in text for text in said)


@pytest.mark.parametrize("times, expected", [(8, 1), (12, 0)])
def test_a_gather_is_said_if_it_is_a_tenth_of_what_is_sent(
    times, expected, monkeypatch
):
    said: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *own: said.append(text % own))

    @helpers.make(2).function
    def step(x):
        sums = tf.transpose(x) @ tf.tile(x, [1, times])  # times as many bytes, about
        return tf.sort(x, 0)[0, 0], tf.reduce_max(tf.abs(sums))

    least, most = step(np.ones([600, 500], np.float32) * 2)
    assert (float(least), float(most)) == (2, 2400)
    assert len(said) == expected


def test_what_is_summed_is_not_said(monkeypatch):
    monkeypatch.setattr(logging, "warning", pytest.fail)
    mean = helpers.make(2).function(lambda x: (tf.reduce_mean(x), x * 2))
    assert float(mean(ROWS)[0]) == 1


def test_rows_of_a_longer_table_are_not_said(monkeypatch):
    monkeypatch.setattr(logging, "warning", pytest.fail)
    autodist = helpers.make(2)
    with autodist.scope():
        table = tf.Variable(np.ones([20_000, 128], np.float32))

    @autodist.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids))
        slope = tf.convert_to_tensor(tape.gradient(loss, table))
        table.assign_sub(0.1 * slope)
        return tf.reduce_max(slope)

    assert float(step(np.arange(4_000) // 2)) == 2
    assert [row.primitive for row in autodist.replicator.plan] == ["all_gather"]
