# SPDX-License-Identifier: Apache-2.0
"""Programs in graphs that any optimizer of TensorFlow 1 trains, for strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import strategy
from tests.autodist.programs import Built, examples

v1 = tf.compat.v1

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.05),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
}
BUILDERS: dict[str, Callable[[], Any]] = {
    "PS": strategy.PS,
    "proxies": functools.partial(strategy.PS, local_proxy_variable=True),
    "PSLoadBalancing": strategy.PSLoadBalancing,
    "PartitionedPS": strategy.PartitionedPS,
    "UnevenPartitionedPS": strategy.UnevenPartitionedPS,
    "AllReduce": strategy.AllReduce,
    "PartitionedAR": strategy.PartitionedAR,
    "RandomAxisPartitionAR": functools.partial(strategy.RandomAxisPartitionAR, seed=1),
    "Parallax": strategy.Parallax,
    "Auto": strategy.Auto,
    "Sharded": strategy.Sharded,
    "columns": lambda: {".*": strategy.Partitioned(axis=1)},
}


def regression(optimizer: Any) -> Built:
    """A matrix and a vector, on fed examples."""
    x = v1.placeholder(tf.float32, [None, 6], "x")
    y = v1.placeholder(tf.float32, [None, 4], "y")
    w = v1.get_variable("w", [6, 4])
    loss = tf.reduce_mean((tf.matmul(x, w) - y) ** 2)
    return Built(
        [loss, optimizer.minimize(loss), w],
        lambda n: {x: examples(n, 6), y: examples(n, 4)},
        [w, *_slots(optimizer, [w])],
    )


def embedding(optimizer: Any) -> Built:
    """A table with row lookups, and a dense layer."""
    ids = v1.placeholder(tf.int32, [None, 3], "ids")
    y = v1.placeholder(tf.float32, [None, 2], "y")
    table = v1.get_variable("table", [10, 4])
    dense = v1.get_variable("dense", [12, 2])
    rows = tf.reshape(tf.nn.embedding_lookup(table, ids), [-1, 12])
    loss = tf.reduce_mean((tf.matmul(rows, dense) - y) ** 2)
    return Built(
        [loss, optimizer.minimize(loss)],
        lambda n: {ids: np.arange(3 * n).reshape(n, 3) % 7, y: examples(n, 2)},
        [table, dense, *_slots(optimizer, [table, dense])],
    )


def condition(optimizer: Any) -> Built:
    """A table with row lookups in a branch."""
    ids = v1.placeholder(tf.int32, [None], "ids")
    y = v1.placeholder(tf.float32, [None], "y")
    use = v1.placeholder_with_default(True, [])
    table = v1.get_variable("table", [10, 4])
    base = v1.get_variable("base", [4, 4])
    rows = tf.cond(
        use,
        lambda: tf.nn.embedding_lookup(table, ids) @ base,
        lambda: tf.zeros([tf.size(ids), 4]) + base[0],
    )
    loss = tf.reduce_mean((tf.reduce_sum(rows, 1) - y) ** 2)
    return Built(
        [loss, optimizer.minimize(loss)],
        lambda n: {ids: np.arange(n) % 7, y: examples(n), use: n != 7},
        [table, base, *_slots(optimizer, [table, base])],
    )


def loop(optimizer: Any) -> Built:
    """A loop over a variable, with a fed number of turns."""
    x = v1.placeholder(tf.float32, [None, 4], "x")
    turns = v1.placeholder(tf.int32, [])
    w = v1.get_variable("w", [4, 4])
    _, output = tf.while_loop(
        lambda k, h: k < turns,
        lambda k, h: (k + 1, tf.tanh(tf.matmul(h, w))),
        [0, x],
    )
    loss = tf.reduce_mean((output - 1.0) ** 2)
    return Built(
        [loss, optimizer.minimize(loss)],
        lambda n: {x: examples(n, 4), turns: n % 3 + 1},
        [w, *_slots(optimizer, [w])],
    )


def _slots(optimizer: Any, variables: list[Any]) -> list[Any]:
    return [
        optimizer.get_slot(variable, name)
        for variable in variables
        for name in optimizer.get_slot_names()
    ]


PROGRAMS = (regression, embedding, condition, loop)
SIZES = (6, 7, 1)  # examples of the steps: even, uneven, fewer than replicas
