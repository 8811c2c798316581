"""The ways of running a training step that are compared.

All of them run the same `workloads.train_step`, from the same initial weights, on the
same examples, and return the mean loss over the global batch. What is timed is one call
of what a factory here returns: the whole step as the user calls it from Python, until
the loss and all updates are there. There is no input pipeline in it: the batches are
tensors that lie ready in memory and that the step captures, which is the cheapest way
to feed each of the contenders.

Replicator does one thing more than the others where there is batch normalization: it
averages the moving statistics over the replicas in each step, where MirroredStrategy
(of TensorFlow 2.21, with Keras 3) lets them drift apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import replicator
from benchmarks import workloads
from benchmarks.workloads import Workload

DEVICES = ("CPU:0", "CPU:1")

# Runs one step and returns the loss, a scalar.
Contender = Callable[[], tf.Tensor]
Weights = list[np.ndarray]


def split_cpu() -> None:
    """Makes one logical CPU per replica, unless TensorFlow has started already."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is None:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * len(DEVICES)
        )


def initial_weights(workload: Workload) -> Weights:
    """Returns the weights that all contenders start from."""
    tf.keras.utils.set_random_seed(0)
    return workload.make_model().get_weights()


def one_device(workload: Workload, weights: Weights) -> Contender:
    """Plain TensorFlow: the global batch on one device, in one tf.function.

    The device is one logical CPU of two, but its ops may use all cores.
    """
    with tf.device(DEVICES[0]):
        model = workload.make_model()
        optimizer = workloads.make_optimizer(model)
        model.set_weights(weights)
        parts = zip(*workload.batches(len(DEVICES)), strict=True)
        batch = tuple(tf.constant(np.concatenate(part)) for part in parts)

    @tf.function
    def step() -> tf.Tensor:
        with tf.device(DEVICES[0]):
            return workloads.train_step(model, optimizer, batch)

    return step


def mirrored_strategy(workload: Workload, weights: Weights) -> Contender:
    """tf.distribute.MirroredStrategy, as its guide for custom training loops has it."""
    strategy = _strategy()
    with strategy.scope():
        model = workload.make_model()
        optimizer = workloads.make_optimizer(model)
    model.set_weights(weights)
    batches = workload.batches(len(DEVICES))
    batch = strategy.experimental_distribute_values_from_function(
        lambda ctx: tuple(map(tf.constant, batches[ctx.replica_id_in_sync_group]))
    )
    scale = 1 / len(DEVICES)  # Keras sums the gradients of a strategy's replicas

    @tf.function
    def step() -> tf.Tensor:
        losses = strategy.run(
            lambda *b: workloads.train_step(model, optimizer, b, scale), args=batch
        )
        return strategy.reduce("MEAN", losses, axis=None)

    return step


@functools.cache
def _strategy() -> tf.distribute.Strategy:
    """Returns the process's one strategy: a second one's collectives would clash."""
    return tf.distribute.MirroredStrategy(DEVICES)


def replicated(workload: Workload, weights: Weights) -> Contender:
    """Replicator: `repl.run` of the step, with its loss reduced to the mean."""
    repl = replicator.Replicator(list(DEVICES))
    with repl.context():
        model = workload.make_model()
        optimizer = repl.wrap_optimizer(workloads.make_optimizer(model))
    model.set_weights(weights)
    batches = workload.batches(len(DEVICES))

    def input_fn(ctx: replicator.InputContext) -> workloads.Batch:
        with tf.device(DEVICES[ctx.replica_id]):
            examples, labels = map(tf.constant, batches[ctx.replica_id])
        return examples, labels

    def step_fn(batch: workloads.Batch) -> tf.Tensor:
        return repl.all_reduce(workloads.train_step(model, optimizer, batch), "mean")

    return lambda: repl.run(step_fn, input_fn)[0]


CONTENDERS: dict[str, Callable[[Workload, Weights], Contender]] = {
    "one device": one_device,
    "MirroredStrategy": mirrored_strategy,
    "Replicator": replicated,
}
