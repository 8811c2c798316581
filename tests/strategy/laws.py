# SPDX-License-Identifier: Apache-2.0
"""Networks, optimizers and builders, and the results of training on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator.strategy import (
    PS,
    AllReduce,
    Builder,
    Mirrored,
    Parallax,
    Partitioned,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    Sharded,
    UnevenPartitionedPS,
)
from replicator.variables.replicated import plain

BUILDERS: dict[str, Callable[[], Builder | dict[str, Builder]]] = {
    "PS": PS,
    "PS copies": lambda: PS(local_proxy_variable=True),
    "PSLoadBalancing": PSLoadBalancing,
    "PSLoadBalancing copies": lambda: PSLoadBalancing(local_proxy_variable=True),
    "PartitionedPS": PartitionedPS,
    "UnevenPartitionedPS": UnevenPartitionedPS,
    "AllReduce": lambda: AllReduce(chunk_size=2),
    "AllReduce ring": lambda: AllReduce(all_reduce_spec="RING"),
    "PartitionedAR": PartitionedAR,
    "RandomAxisPartitionAR": lambda: RandomAxisPartitionAR(chunk_size=3),
    "Parallax": Parallax,
    "Sharded": Sharded,
    "Mirrored": Mirrored,
    "rules": lambda: {"kernel": Partitioned(axis=-1), ".*": PSLoadBalancing(True)},
}

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: tf.keras.optimizers.SGD(0.05),
    "momentum": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam with clipnorm": lambda: tf.keras.optimizers.Adam(0.01, clipnorm=0.5),
    "v1 Adagrad": lambda: tf.compat.v1.train.AdagradOptimizer(0.05),
}

EXAMPLES = 12  # per step, for 1, 2 and 3 replicas

# A network is made under a context; it takes one batch of inputs, and returns outputs.
Network = Callable[[tf.Tensor], tf.Tensor]


def _dense() -> tuple[Network, list[Any]]:
    model = tf.keras.Sequential(
        [
            tf.keras.Input([6]),
            tf.keras.layers.Dense(7, activation="tanh", name="one"),
            tf.keras.layers.Dense(2, name="two"),
        ]
    )
    return model, model.trainable_variables


def _convolution() -> tuple[Network, list[Any]]:
    # The batch's statistics are per replica: they are not compared here.
    norm = tf.keras.layers.BatchNormalization(name="norm")
    convolution = tf.keras.layers.Conv2D(4, 2, name="convolution")
    head = tf.keras.layers.Dense(2, name="head")
    norm.build([None, 2, 1, 4])
    convolution.build([None, 3, 2, 1])
    head.build([None, 8])

    def call(x: tf.Tensor) -> tf.Tensor:
        hidden = convolution(tf.reshape(x, [-1, 3, 2, 1]))
        return head(tf.reshape(norm(hidden, training=False), [-1, 8]))

    layers = (convolution, norm, head)
    return call, [v for layer in layers for v in layer.trainable_variables]


def _lstm() -> tuple[Network, list[Any]]:
    embedding = tf.keras.layers.Embedding(9, 4, name="embedding")
    lstm = tf.keras.layers.LSTM(3, name="lstm")
    head = tf.keras.layers.Dense(2, name="head")
    embedding.build([None, 6])
    lstm.build([None, 6, 4])
    head.build([None, 3])

    def call(x: tf.Tensor) -> tf.Tensor:
        ids = tf.cast(tf.abs(x) * 5, tf.int32) % 9
        return head(lstm(embedding(ids)))

    layers = (embedding, lstm, head)
    return call, [v for layer in layers for v in layer.trainable_variables]


def _loop() -> tuple[Network, list[Any]]:
    w = tf.Variable(tf.reshape(tf.sin(tf.range(36.0)), [6, 6]) * 0.3, name="kernel")
    b = tf.Variable(tf.zeros([6]), name="bias")

    def call(x: tf.Tensor) -> tf.Tensor:
        _, x = tf.while_loop(
            lambda k, _: k < 3, lambda k, y: (k + 1, tf.tanh(y @ w) + b), [0, x]
        )
        return x[:, :2]

    return call, [w, b]


def _condition() -> tuple[Network, list[Any]]:
    w = tf.Variable(tf.reshape(tf.sin(tf.range(12.0)), [6, 2]), name="kernel")
    v = tf.Variable(tf.reshape(tf.cos(tf.range(12.0)), [6, 2]), name="other/kernel")
    scale = tf.Variable(0.5, name="scale")

    def call(x: tf.Tensor) -> tf.Tensor:
        positive = tf.greater(tf.size(x), 0)
        return tf.cond(positive, lambda: x @ w * scale, lambda: x @ v) + x @ v

    return call, [w, v, scale]


NETWORKS: dict[str, Callable[[], tuple[Network, list[Any]]]] = {
    "dense": _dense,
    "convolution": _convolution,
    "embedding and LSTM": _lstm,
    "loop": _loop,
    "condition": _condition,
}


def trained(
    repl: replicator.Replicator, network: str, optimizer: str, steps: int = 3
) -> tuple[list[float], list[np.ndarray], list[Any]]:
    """Returns the losses of a training, the final values, and the variables."""
    random = np.random.RandomState(7)
    x = random.randn(EXAMPLES, 6).astype(np.float32)
    y = random.randn(EXAMPLES, 2).astype(np.float32)
    with repl.context():
        tf.keras.utils.set_random_seed(5)
        call, variables = NETWORKS[network]()
        wrapped = repl.wrap_optimizer(OPTIMIZERS[optimizer]())

    def step_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((call(x) - y) ** 2)
        gradients = tape.gradient(loss, variables)
        # TensorFlow 1's optimizers do not know Keras' variables.
        v1 = optimizer.startswith("v1")
        updated = list(map(plain, variables)) if v1 else variables
        wrapped.apply_gradients(zip(gradients, updated, strict=True))
        return repl.all_reduce(loss, "mean")

    step = repl.build(step_fn, (x, y), input_mode="global_batch")
    losses = [float(step()[0]) for _ in range(steps)]
    return losses, [np.asarray(v) for v in variables], variables
