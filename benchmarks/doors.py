# SPDX-License-Identifier: Apache-2.0
"""The time until the first result through each door: `python -m benchmarks.doors`.

The 100-layer MLP, from its variables to the first result of a step: as a step of a
Replicator with build="clone", as a TensorFlow 1 graph that AutoDist distributes, and as
a function of AutoDist. They take turns in one process and are compared by their least
processor time, which other programs disturb less than wall time.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

import replicator
from benchmarks import cli, contenders, networks, results
from benchmarks.tables import Table

_COUNTS = flags.DEFINE_list("door_counts", None, "Numbers of replicas.")

NAME = "doors"
COUNTS = (8, 32)
ROUNDS = 3
CLONED, SESSION, FUNCTION = 'build="clone"', "AutoDist, session", "AutoDist.function"
PER_REPLICA_BATCH = 4  # the cost of a step does not matter here
v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Program:
    """A perceptron, trained with momentum by a plain single-device program.

    Args:
        network: The network's sizes.
    """

    network: networks.Perceptron

    def variables(self) -> list[tf.Variable]:
        """Returns new variables: kernels and biases."""
        rng, new_variables = np.random.default_rng(0), []
        sizes = self.network.sizes
        for k, shape in enumerate(zip(sizes, sizes[1:], strict=False)):
            kernel = rng.normal(0, (2 / shape[0]) ** 0.5, shape).astype(np.float32)
            new_variables.append(tf.Variable(kernel, name=f"kernel_{k}"))
            new_variables.append(tf.Variable(tf.zeros(shape[1:]), name=f"bias_{k}"))
        return new_variables

    @staticmethod
    def loss(variables: list[tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Returns the mean loss over the examples."""
        pairs = list(zip(variables[::2], variables[1::2], strict=True))
        for kernel, bias in pairs[:-1]:
            x = tf.nn.relu(tf.matmul(x, kernel) + bias)
        logits = tf.matmul(x, pairs[-1][0]) + pairs[-1][1]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        return tf.reduce_mean(losses)


def _optimizer() -> Any:
    return v1.train.MomentumOptimizer(networks.LEARNING_RATE, networks.MOMENTUM)


def by_clone(program: Program, count: int, x: np.ndarray, y: np.ndarray) -> float:
    """Builds a step of a Replicator; returns its first result."""
    repl = replicator.Replicator(contenders.devices(count), build="clone")
    with repl.context():
        variables = program.variables()
        optimizer = repl.wrap_optimizer(_optimizer())

    def step_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = program.loss(variables, x, y)
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return repl.all_reduce(loss, "mean")

    parts = (replicator.PerReplica(np.array_split(array, count)) for array in (x, y))
    return float(repl.run(step_fn, args=tuple(parts))[0])


def by_session(program: Program, count: int, x: np.ndarray, y: np.ndarray) -> float:
    """Builds a graph and distributes it; returns its first result."""
    autodist = replicator.AutoDist(contenders.devices(count))
    with tf.Graph().as_default(), autodist.scope():
        variables = program.variables()
        features = v1.placeholder(tf.float32, [None, x.shape[1]])
        labels = v1.placeholder(tf.int32, [None])
        loss = program.loss(variables, features, labels)
        train = _optimizer().minimize(loss)
        session = autodist.create_distributed_session()
        value, _ = session.run([loss, train], {features: x, labels: y})
        session.close()
    return float(value)


def by_function(program: Program, count: int, x: np.ndarray, y: np.ndarray) -> float:
    """Builds a function; returns its first result."""
    autodist = replicator.AutoDist(contenders.devices(count))
    with autodist.scope():
        variables, optimizer = program.variables(), _optimizer()

    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = program.loss(variables, x, y)
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    return float(step(x, y))


DOORS: Mapping[str, Callable[..., float]] = {
    CLONED: by_clone,
    SESSION: by_session,
    FUNCTION: by_function,
}


def measure(count: int, network: networks.Perceptron, rounds: int) -> dict[str, float]:
    """Returns the least processor time of each door, in seconds."""
    program = Program(network)
    x, y = network.batch(PER_REPLICA_BATCH * count)
    tiny = Program(networks.Perceptron(2, 2, 1))
    for door in DOORS.values():  # imports and initializes everything first
        door(tiny, count, *networks.Perceptron(2, 2, 1).batch(count))
    least = dict.fromkeys(DOORS, float("inf"))
    seconds = {}
    for _ in range(rounds):
        for name, door in DOORS.items():
            gc.collect()
            start = time.process_time()
            seconds[name] = door(program, count, x, y)
            least[name] = min(least[name], time.process_time() - start)
    if max(seconds.values()) - min(seconds.values()) > 1e-3:
        cli.fail(f"the doors compute different losses, {seconds}")
    return least


def tables(found: Mapping[str, Mapping[str, float]]) -> list[Table]:
    """Returns a table of each door's time and its ratio to cloning.

    Args:
        found: `found[replicas][door]` is in seconds.
    """
    rows = [
        [
            name,
            *(f"{by_name[name]:.1f}" for by_name in found.values()),
            *(f"{by_name[name] / by_name[CLONED]:.2f}" for by_name in found.values()),
        ]
        for name in DOORS
    ]
    heading = [
        "replicas",
        *found,
        *(f"{count}: of that by cloning" for count in found),
    ]
    title = (
        "Until the first result of the 100-layer MLP by each door, in s of processor"
    )
    return [Table(title, heading, rows)]


def main(argv: list[str]) -> None:
    """Measures, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    if cli.CELL.value is not None:
        tf.get_logger().setLevel("ERROR")
        count = int(cli.CELL.value)
        contenders.split_cpu(count)
        small = cli.QUICK.value
        network = networks.Perceptron(8, 8, 3) if small else networks.DEEP
        print(json.dumps(measure(count, network, 1 if small else ROUNDS)))
        return
    counts = cli.numbers("door_counts", _COUNTS.value)
    about = results.facts()
    measurements = {}
    for count in counts or ((2,) if cli.QUICK.value else COUNTS):
        cli.progress(f"doors: {count} replicas ...")
        measurements[str(count)] = cli.apart("benchmarks.doors", f"--cell={count}")
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
