# SPDX-License-Identifier: Apache-2.0
"""Programs of several runs that several processes build together.

One process must get the same results; tests/programs has those of one step. Each
function of RUNS takes a Replicator of four replicas and returns their results, a
PerReplica or a list of such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replicator
from replicator import Replicator

REPLICAS = 4


def variables(repl: Replicator) -> Any:
    with repl.context():
        v = tf.Variable([1.0, 2.0])
        count = tf.Variable(0)
        once = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def step_fn() -> Any:
        v.assign(v * repl.replica_id)
        count.assign_add(1)
        once.assign_add(repl.replica_id + 1.0)
        return [v.read_value(), count.read_value()]

    results = [repl.run(step_fn) for _ in range(3)]
    return [results, float(once), v.numpy(), int(count)]


def random_numbers(repl: Replicator) -> Any:
    tf.random.set_seed(3)
    with repl.context():
        generator = tf.random.Generator.from_seed(1)

    def step_fn() -> Any:
        return [generator.normal([2]), tf.random.uniform([2], seed=5)]

    return [repl.run(step_fn) for _ in range(2)]


def inputs(repl: Replicator) -> Any:
    tf.random.set_seed(1)  # shuffling depends on it, and other tests set another

    def of_replica(ctx: replicator.InputContext) -> tf.data.Dataset:
        shard = tf.data.Dataset.range(24).shard(ctx.num_pipelines, ctx.pipeline_id)
        return shard.batch(ctx.per_replica_batch_size(8))

    whole = tf.data.Dataset.range(24).shuffle(24, seed=7).batch(2)
    step_fn = lambda x: tf.cast(x, tf.int32)  # noqa: E731
    split = tf.data.Dataset.range(30).batch(10)
    return [
        [repl.run(step_fn, of_replica) for _ in range(3)],
        [repl.run(step_fn, whole) for _ in range(3)],
        [repl.run(step_fn, lambda: whole) for _ in range(2)],
        [repl.run(lambda x: tf.reduce_sum(x), split, "global_batch") for _ in range(2)],
        repl.run(step_fn, args=(np.arange(4),)),
        repl.run(lambda x: tf.reduce_sum(x), np.arange(10), "global_batch"),
    ]


def compressed(repl: Replicator) -> Any:
    """The received values, and the kept state, which is read from all processes."""
    results = []
    for name in ("bf16", "int8", "topk(ratio=0.3)", "powersgd(rank=1)"):
        for text in (name, f"ef({name})"):
            with repl.context():
                w = tf.Variable(tf.zeros([6, 5]))
                optimizer = repl.wrap_optimizer(
                    keras.optimizers.SGD(1.0), compressor=text
                )

            def step_fn(
                w: Any = w, optimizer: Any = optimizer, text: str = text
            ) -> Any:
                rng = np.random.default_rng(repl.replica_id)
                x = tf.constant(rng.integers(0, 9, (6, 5)), tf.float32) + 0.01
                optimizer.apply([x], [w])
                return repl.all_reduce(x, compressor=text)

            received = [repl.run(step_fn) for _ in range(1 if name == "int8" else 2)]
            memory = optimizer._replicator_combiner.compression.memory
            state = [v.numpy() for v in memory.variables if "noise" not in v.name]
            results.append([received, w.numpy(), state])
    return results


RUNS: dict[str, Callable[[Replicator], Any]] = {
    function.__name__: function
    for function in (variables, random_numbers, inputs, compressed)
}
