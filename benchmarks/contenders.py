# SPDX-License-Identifier: Apache-2.0
"""The contenders: ways of running one training step.

All of them run the same `workloads.train_step`, from the same initial weights, on the
same examples, and return the mean loss over the global batch. The timing covers one
call of a factory's result: the whole step as a user calls it from Python, until the
loss and all updates are complete. There is no input pipeline: the step captures batches
that are already tensors in memory, the cheapest way to feed any contender.

Only Replicator averages the moving statistics of batch normalization over the replicas
in each step; MirroredStrategy (TensorFlow 2.21 with Keras 3) lets them drift apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from benchmarks import workloads
from benchmarks.workloads import Workload

BASELINE, RIVAL = "one device", "MirroredStrategy"
OURS, MIRRORED, CLONED = "Replicator", "Replicator, mirrored", "Replicator, clone"
ONE_REPLICA = "Replicator, one replica"
DEVICES = ("CPU:0", "CPU:1")

# Runs one step and returns the loss, a scalar.
Step = Callable[[], tf.Tensor]
Weights = list[np.ndarray]
# Makes a step of a workload for a number of replicas, from the given weights.
Factory = Callable[[Workload, int, Weights], Step]


def devices(replicas: int) -> list[str]:
    """Returns one logical CPU per replica."""
    return [f"CPU:{r}" for r in range(replicas)]


def split_cpu(replicas: int = len(DEVICES)) -> None:
    """Makes one logical CPU per replica, unless TensorFlow is already initialized."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is None:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
        )


def initial_weights(workload: Workload) -> Weights:
    """Returns the initial weights of all contenders."""
    tf.keras.utils.set_random_seed(0)
    return workload.make_model().get_weights()


def one_device(
    workload: Workload, replicas: int, weights: Weights, device: str = DEVICES[0]
) -> Step:
    """Plain TensorFlow: the global batch on one device, in one tf.function.

    The device is one of several logical CPUs, but its ops may use all cores.
    """
    del replicas
    with tf.device(device):
        model = workload.make_model()
        optimizer = workloads.make_optimizer(workload, model)
        model.set_weights(weights)
        batch = tf.nest.map_structure(tf.constant, workload.parts(1)[0])

    @tf.function
    def step() -> tf.Tensor:
        with tf.device(device):
            return workloads.train_step(
                model, optimizer, batch, compiled=workload.compiled
            )

    return step


def mirrored_strategy(workload: Workload, replicas: int, weights: Weights) -> Step:
    """tf.distribute.MirroredStrategy, used as in its custom training loop guide."""
    strategy = strategy_of(replicas)
    with strategy.scope():
        model = workload.make_model()
        optimizer = workloads.make_optimizer(workload, model)
    model.set_weights(weights)
    parts = workload.parts(replicas)
    batch = strategy.experimental_distribute_values_from_function(
        lambda ctx: tf.nest.map_structure(
            tf.constant, parts[ctx.replica_id_in_sync_group]
        )
    )
    scale = 1 / replicas  # Keras sums the gradients of a strategy's replicas

    @tf.function
    def step() -> tf.Tensor:
        losses = strategy.run(
            lambda *b: workloads.train_step(model, optimizer, b, scale), args=batch
        )
        return strategy.reduce("MEAN", losses, axis=None)

    return step


@functools.cache
def strategy_of(replicas: int) -> tf.distribute.Strategy:
    """Returns the process's only strategy: a second one's collectives would clash."""
    return tf.distribute.MirroredStrategy(devices(replicas))


def replicated(
    workload: Workload,
    replicas: int,
    weights: Weights,
    names: Sequence[str] | None = None,
    **options: Any,
) -> Step:
    """Replicator: the built step, with its loss reduced to the mean; see `built`."""
    step = built(workload, replicas, weights, names, **options)
    return lambda: step()[0]


def built(
    workload: Workload,
    replicas: int,
    weights: Weights,
    names: Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Returns a Replicator's step, which has a plan after its first call.

    Args:
        workload: The workload to train.
        replicas: The number of replicas.
        weights: The initial weights.
        names: One device per replica; None for logical CPUs.
        **options: Options of the Replicator.
    """
    return made(workload, replicas, weights, names, **options)[1]


def made(
    workload: Workload,
    replicas: int,
    weights: Weights,
    names: Sequence[str] | None = None,
    **options: Any,
) -> tuple[replicator.Replicator, Any]:
    """Returns a Replicator and its step; see `built`."""
    repl = replicator.Replicator(names or devices(replicas), **options)
    with repl.context():
        model = workload.make_model()
        optimizer = repl.wrap_optimizer(workloads.make_optimizer(workload, model))
    model.set_weights(weights)
    parts = workload.parts(replicas)

    def input_fn(ctx: replicator.InputContext) -> workloads.Batch:
        with tf.device(repl.devices[ctx.replica_id]):
            return tf.nest.map_structure(tf.constant, parts[ctx.replica_id])

    def step_fn(batch: workloads.Batch) -> tf.Tensor:
        loss = workloads.train_step(model, optimizer, batch, compiled=workload.compiled)
        return repl.all_reduce(loss, "mean")

    return repl, repl.build(step_fn, input_fn)


def one_replica(workload: Workload, replicas: int, weights: Weights) -> Step:
    """Replicator with the global batch on one device: the baseline of replication."""
    del replicas
    return replicated(workload, 1, weights)


# The options of each Replicator contender. The first has the defaults.
OPTIONS: Mapping[str, dict[str, Any]] = {
    OURS: {"variables": "auto"},
    MIRRORED: {"variables": "mirrored"},
    CLONED: {"build": "clone"},
}


def factories(*names: str) -> dict[str, Factory]:
    """Returns the factories of contenders by name, without those that do not exist yet.

    Args:
        *names: Replicator contenders: ONE_REPLICA, OURS, MIRRORED, CLONED.
    """
    return {
        BASELINE: one_device,
        RIVAL: mirrored_strategy,
        **({ONE_REPLICA: one_replica} if ONE_REPLICA in names else {}),
        **{
            name: functools.partial(replicated, **OPTIONS[name])
            for name in names
            if name != ONE_REPLICA
        },
    }
