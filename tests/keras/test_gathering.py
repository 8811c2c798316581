# SPDX-License-Identifier: Apache-2.0
"""Gathered shards are the batch, with the gradients of one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import context
from replicator.keras import gathering
from tests import helpers

BATCH = np.random.default_rng(0).normal(size=[5, 2])


def _whole(value: Any) -> Any:
    return gathering.whole(value, context.require("the test").shard)


def _run(step_fn: Any, batch: Any, num_replicas: int = 2) -> Any:
    repl = helpers.make(num_replicas)
    return repl.run(step_fn, batch, input_mode="global_batch")


@pytest.mark.battery(5)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])  # eight: some have no example
def test_every_replica_gets_the_batch(num_replicas: int) -> None:
    for actual in _run(_whole, tf.constant(BATCH), num_replicas):
        np.testing.assert_array_equal(actual, BATCH)


def test_nests_come_with_what_is_no_tensor() -> None:
    def step_fn(batch: Any) -> Any:
        whole = _whole(
            {"x": batch["x"], "n": 3, "none": None, "scalar": tf.constant(2)}
        )
        assert whole["n"] == 3 and whole["none"] is None
        return whole["x"], whole["scalar"]

    x, scalar = _run(step_fn, {"x": tf.range(5)})
    np.testing.assert_array_equal(x, [range(5)] * 2)
    assert [int(n) for n in scalar] == [2, 2]


def test_ragged_tensors_are_gathered() -> None:
    ragged = tf.ragged.constant([[1], [], [2, 3], [4], [5, 6, 7]])
    for actual in _run(lambda x: _whole(x).to_tensor(), ragged):
        np.testing.assert_array_equal(actual, ragged.to_tensor())


def test_masks_come_along() -> None:
    mask = [True, False, True, True, False]

    def step_fn(batch: Any) -> Any:
        x, own = tf.identity(batch[0]), batch[1]
        assert gathering.mask_of(x) is None
        gathering.set_mask(x, own)
        return gathering.mask_of(_whole(x))

    for actual in _run(step_fn, (tf.range(5), tf.constant(mask))):
        np.testing.assert_array_equal(actual, mask)


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(
        replicator.ArgumentError, match=r"(?s)a SparseTensor.*at tests.*Fix: .*to_dense"
    ):
        _run(lambda x: _whole(tf.sparse.from_dense(x)), tf.constant(BATCH))


@pytest.mark.battery(5)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_weighed_means_of_gradients_are_those_of_one_device(num_replicas: int) -> None:
    """With a loss in which every example affects every other."""

    def loss_of(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.matmul(x, x, transpose_a=True) ** 2)

    start = tf.constant([[1.0, 2.0], [3.0, -1.0]], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(start)
        loss = loss_of(tf.constant(BATCH) @ start)
    want = tape.gradient(loss, start)
    repl = helpers.make(num_replicas)

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        w = tf.identity(start)
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = loss_of(_whole(x @ w))
        own_gradient = tape.gradient(loss, w)
        return repl.all_reduce(own_gradient, "mean", weight=repl.weight)

    for actual in repl.run(step_fn, tf.constant(BATCH), input_mode="global_batch"):
        np.testing.assert_allclose(actual, want, rtol=1e-6)  # weights are float32
