# SPDX-License-Identifier: Apache-2.0
"""A training on handwritten digits: on one device by TensorFlow alone, and on replicas.

`python -m tests.cluster.digits ADDRESS...` trains on servers' devices, and prints the
result of `replicated` as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import replicator

STEPS, _BATCH = 40, 64


def _data() -> tf.data.Dataset:
    """Returns the examples, in training order."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    data = images[order], digits.target[order].astype(np.int64)
    return tf.data.Dataset.from_tensor_slices(data).repeat()


def _model() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def _loss(model: Any, batch: Any) -> Any:
    images, labels = batch
    logits = model(images, training=True)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(each)


def plain() -> tuple[list[float], list[np.ndarray]]:
    """Trains on one device, without Replicator; returns the losses and the weights."""
    tf.keras.utils.set_random_seed(1)
    model = _model()
    optimizer = tf.keras.optimizers.SGD(0.05, 0.9)

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _loss(model, batch)
        weights = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return loss

    optimizer.build(model.trainable_variables)
    losses = [float(step(batch)) for batch in _data().batch(_BATCH).take(STEPS)]
    return losses, [weight.numpy() for weight in model.weights]


def replicated(cluster: Any) -> dict[str, Any]:
    """Trains on the devices of all hosts.

    Returns:
        The losses; the number of replicas; the weights; and, for each replica of this
        process, a fingerprint of the bits of its weights.
    """
    repl = replicator.Replicator(cluster.devices, variables="mirrored")
    tf.keras.utils.set_random_seed(1)
    with repl.context():
        model = _model()
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.05, 0.9))

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        shard = _data().shard(ctx.num_pipelines, ctx.pipeline_id)
        return shard.batch(ctx.per_replica_batch_size(_BATCH))

    def step_fn(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _loss(model, batch)
        weights = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        return repl.all_reduce(loss, "mean")

    losses = [float(repl.run(step_fn, input_fn)[0]) for _ in range(STEPS)]
    by_replica = zip(*(_components(weight) for weight in model.weights), strict=True)
    return {
        "replicas": repl.num_replicas,
        "losses": losses,
        "weights": [weight.numpy().tolist() for weight in model.weights],
        "bits": [
            hashlib.sha256(b"".join(part.tobytes() for part in shard)).hexdigest()
            for shard in by_replica
        ],
    }


def _components(weight: Any) -> list[np.ndarray]:
    return [component.numpy() for component in weight.value.components]


def main(addresses: Sequence[str]) -> None:
    """Trains on servers."""
    cluster = replicator.connect(list(addresses), timeout=300)
    print(json.dumps(replicated(cluster)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # skips the exit of a connected process, which is not tested
