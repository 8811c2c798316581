# SPDX-License-Identifier: Apache-2.0
"""Graph networks of spektral, on batches of dense graphs."""

from __future__ import annotations

import numpy as np
import pytest
import spektral
import tensorflow as tf
import tf_keras

from tests.clients.training import Training, check, ways

RNG = np.random.default_rng(1)
NODES = RNG.normal(size=[12, 5, 3]).astype(np.float32)
EDGES = np.maximum(RNG.integers(0, 2, [12, 5, 5]), np.eye(5)).astype(np.float32)
LABELS = RNG.integers(0, 3, 12)
LOSS = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _network(make_layers, optimizer) -> Training:
    tf_keras.utils.set_random_seed(1)
    convolutions = make_layers()
    pool = spektral.layers.GlobalAvgPool()
    head = tf_keras.layers.Dense(3)

    def loss(x: tf.Tensor, adjacency: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        for layer in convolutions:
            x = layer([x, adjacency])
        return LOSS(labels, head(pool(x)))

    return Training(
        loss,
        lambda: [v for layer in (*convolutions, head) for v in layer.trainable_weights],
        optimizer,
        (NODES, EDGES, LABELS),
    )


def convolution() -> Training:
    return _network(
        lambda: [spektral.layers.GCNConv(4, activation="relu") for _ in range(2)],
        tf_keras.optimizers.Adam(0.05),
    )


def attention() -> Training:
    return _network(
        lambda: [spektral.layers.GATConv(4, attn_heads=2, dropout_rate=0.0)],
        tf_keras.optimizers.legacy.SGD(0.05, momentum=0.9),
    )


@ways
@pytest.mark.parametrize("program", [convolution, attention])
def test_equals_one_device(program, replicas, options):
    check(program, replicas, options)
