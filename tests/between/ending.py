# SPDX-License-Identifier: Apache-2.0
"""Inputs that end on one host before they do on another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import replicator
from replicator import Replicator

Data = Callable[[replicator.InputContext], tf.data.Dataset]


def _sizes(*sizes: int) -> Data:
    """Returns an input_fn whose datasets have a given size on each host."""
    return lambda ctx: tf.data.Dataset.range(sizes[ctx.host_id])


def _unknown(*sizes: int) -> Data:
    """The same, with unknown sizes."""
    return lambda ctx: tf.data.Dataset.range(9).filter(lambda x: x < sizes[ctx.host_id])


def epochs(repl: Replicator, inputs: Any, steps: int = 1, mode: str = "per_replica"):
    """Returns the steps of two epochs, and the variable that counts them."""
    with repl.context():
        count = tf.Variable(0)

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        repl.all_reduce(tf.cast(count, tf.float32))  # needs no input
        count.assign_add(1)
        return repl.all_reduce(tf.reduce_sum(x))

    step = repl.build(step_fn, inputs, mode, steps)
    counts = []
    for _ in range(2):
        sums: list[Any] = []
        try:
            while True:
                sums.append(step()[0].numpy().tolist())
        except tf.errors.OutOfRangeError:
            counts.append([sums, int(count)])
        step.initialize()
    return counts


def gathers(repl: Replicator, inputs: Any) -> int:
    """Returns how often a step gathers whether there are inputs."""
    step = tf.function(lambda: repl.run(lambda x: repl.all_reduce(x), inputs))
    ops = step.get_concrete_function().graph.get_operations()
    return sum(op.type == "CollectiveGatherV2" for op in ops)


def input_ends(cluster: Any) -> dict[str, Any]:
    """Returns the results of steps whose inputs end, by the kind of input."""
    repl = Replicator(cluster.devices)
    either = tf.data.Dataset.range(9).filter(lambda x: x < 7)  # is dealt
    return {
        "known": epochs(repl, _sizes(3, 5)),
        "known, first": epochs(repl, _sizes(5, 3)),
        "none": epochs(repl, _sizes(0, 2)),
        "unknown": epochs(repl, _unknown(4, 2)),
        "mixed": epochs(
            repl, lambda ctx: (_unknown if ctx.host_id else _sizes)(2, 4)(ctx)
        ),
        "equal": epochs(repl, _sizes(3, 3)),
        "dealt": epochs(repl, either),
        "split": epochs(repl, either.batch(4), mode="global_batch"),
        "per worker": epochs(repl, _sizes(2, 4), mode="per_worker"),
        "loop": epochs(repl, _sizes(5, 8), steps=2),
        "gathers": [
            gathers(repl, data)
            for data in (
                _sizes(3, 5),
                _unknown(3, 3),
                _sizes(3, 3),
                lambda ctx: tf.data.Dataset.range(3 + ctx.host_id).repeat(),
                tf.data.Dataset.range(6),
                either,
            )
        ],
    }
