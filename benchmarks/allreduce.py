# SPDX-License-Identifier: Apache-2.0
"""All-reduce alone, over sizes: `python -m benchmarks.allreduce [--only=1MiB,64MiB]`.

Each replica holds a tensor and gets the sum. Compares Replicator's algorithms,
MirroredStrategy, and one device that adds up all tensors by itself: the lower bound for
an all-reduce in shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

import replicator
from benchmarks import cli, contenders, results, timing
from benchmarks.contenders import OURS, RIVAL
from benchmarks.tables import Table, time
from replicator.costs.cost import ALGORITHM_NAMES

_REPLICAS = flags.DEFINE_integer(
    "reducers", 2, "How many replicas.", lower_bound=2, upper_bound=64
)

NAME = "allreduce"
BASELINE = "added on one device"
KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    **{f"{n}KiB": n * KIB for n in (1, 4, 16, 64, 256)},
    **{f"{n}MiB": n * MIB for n in (1, 4, 16, 64, 256)},
}
QUICK = ("1KiB", "1MiB")
CPU_ALGORITHMS = [name for name in ALGORITHM_NAMES if name != "nccl"]  # GPUs only

# Runs one all-reduce; returns one tensor per replica.
Reduce = Callable[[], Any]


def steps(nbytes: int) -> int:
    """Returns how many all-reduces of a size are timed: about a second's worth."""
    return min(600, max(20, 1024 * MIB // nbytes))


def operands(
    nbytes: int, replicas: int, names: Sequence[str] | None = None
) -> list[tf.Tensor]:
    """Returns each replica's operand, float32 [nbytes / 4], on its device.

    Sums of them are exact.

    Args:
        nbytes: The bytes of each operand.
        replicas: The number of replicas.
        names: One device per replica; None for logical CPUs.
    """
    values = []
    for replica_id, device in enumerate(names or contenders.devices(replicas)):
        with tf.device(device):
            values.append(tf.fill([nbytes // 4], 2.0**replica_id))
    return values


def added(values: list[tf.Tensor]) -> Reduce:
    """Plain TensorFlow: the device that holds all tensors adds them up."""
    device = contenders.DEVICES[0]
    with tf.device(device):
        tensors = [tf.identity(value) for value in values]

    @tf.function
    def step() -> tf.Tensor:
        with tf.device(device):
            return tf.add_n(tensors)

    return lambda: [step()]


def doubled(values: list[tf.Tensor], names: Sequence[str]) -> Reduce:
    """Plain TensorFlow: each device adds its tensor to itself; nothing is sent."""

    @tf.function
    def step() -> list[tf.Tensor]:
        results = []
        for value, name in zip(values, names, strict=True):
            with tf.device(name):
                results.append(value + value)
        return results

    return step


def mirrored(values: list[tf.Tensor]) -> Reduce:
    """MirroredStrategy: its ReplicaContext.all_reduce, in strategy.run."""
    strategy = contenders.strategy_of(len(values))
    operand = strategy.experimental_distribute_values_from_function(
        lambda ctx: values[ctx.replica_id_in_sync_group]
    )

    def reduce(x: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("sum", x)

    @tf.function
    def step() -> Any:
        return strategy.run(reduce, args=(operand,))

    return lambda: strategy.experimental_local_results(step())


def replicated(
    values: list[tf.Tensor],
    algorithm: str | None = None,
    names: Sequence[str] | None = None,
) -> Reduce:
    """Replicator: `all_reduce`, by a given algorithm or by its own choice.

    Args:
        values: The result of `operands`.
        algorithm: None lets Replicator choose.
        names: The devices of the values; None for logical CPUs.
    """
    names = names or contenders.devices(len(values))
    repl = replicator.Replicator(names, algorithm=algorithm)

    def input_fn(ctx: replicator.InputContext) -> tf.Tensor:
        return values[ctx.replica_id]

    return repl.build(lambda x: repl.all_reduce(x), input_fn)


def checked(reduce: Reduce, values: list[tf.Tensor], name: str) -> timing.Run:
    """Returns a timed all-reduce, after checking its results."""
    total = np.sum([value.numpy() for value in values], axis=0)
    for result in reduce():
        if not np.array_equal(result.numpy(), total):
            cli.fail(f"{name} gives a wrong sum of {total.nbytes} bytes")
    return timed(reduce)


def timed(reduce: Reduce) -> timing.Run:
    """Returns a timed all-reduce, without checking its results."""

    def step() -> float:
        reduce()
        return 0.0  # there is no loss

    return timing.in_turn(step)


def measure(nbytes: int, replicas: int) -> dict[str, timing.Measured]:
    """Measures all contenders on tensors of one size."""
    values = operands(nbytes, replicas)
    reducers = {
        BASELINE: added(values),
        RIVAL: mirrored(values),
        OURS: replicated(values),
    }
    for algorithm in CPU_ALGORITHMS:
        reducers[f"{OURS}, {algorithm}"] = replicated(values, algorithm)
    runs = {name: checked(reduce, values, name) for name, reduce in reducers.items()}
    return timing.measure(runs, cli.steps(steps(nbytes)), cli.rounds(), warm_up=2)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of times and ratios.

    Args:
        found: `found[size][contender]` is a Measured as a dict.
    """
    names = list(next(iter(found.values())))
    rows = []
    for size, by_name in found.items():
        measured = {n: timing.Measured.from_json(by_name[n]) for n in names}
        rows.append(
            [
                size,
                *(time(measured[name].median) for name in names),
                f"{SIZES[size] / measured[OURS].median / 1e9:.2f}",
                f"{timing.ratio(measured[RIVAL], measured[OURS]):.2f}",
                f"{measured[BASELINE].spread:.1%}",
            ]
        )
    last = [f"{OURS}, GB/s", f"{RIVAL} / {OURS}", "noise"]
    return [
        Table(
            "All-reduce alone",
            ["size of each replica's tensor", *names, *last],
            rows,
            "Median times; GB/s are bytes of one replica's tensor by the time.",
        )
    ]


def main(argv: list[str]) -> None:
    """Measures all sizes, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    sizes = cli.chosen(SIZES)
    if cli.QUICK.value and cli.ONLY.value is None:
        sizes = list(QUICK)
    tf.get_logger().setLevel("ERROR")
    contenders.split_cpu(_REPLICAS.value)
    about = results.facts()
    measurements = {}
    for size in sizes:
        cli.progress(f"allreduce: measuring {size} ...")
        measured = measure(SIZES[size], _REPLICAS.value)
        measurements[size] = {
            name: dataclasses.asdict(measurement)
            for name, measurement in measured.items()
        }
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
