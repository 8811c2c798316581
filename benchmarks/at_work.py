# SPDX-License-Identifier: Apache-2.0
"""All-reduce between other work: `python -m benchmarks.at_work [--only=1MiB,64MiB]`.

Each replica adds one to a tensor, all-reduces it, and takes the maximum of the sum. The
same work on one device communicates nothing. There, TensorFlow turns the three sums, (v
+ 1) + (w + 1), into two, which replicas cannot: each adds one to what it alone has. So
one device is measured with the three sums, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import app

import replicator
from benchmarks import allreduce, cli, contenders, results, timing
from benchmarks.contenders import BASELINE, DEVICES, OURS, RIVAL
from benchmarks.tables import Table, time
from replicator.primitives import arithmetic

NAME = "at_work"
THREE_SUMS = f"{BASELINE}, three sums"
SIZES = ("1MiB", "64MiB")

# Runs the work once; returns one maximum per replica.
Reduce = Callable[[], Any]


def one_device(values: list[tf.Tensor], of_three_sums: bool = False) -> Reduce:
    """Plain TensorFlow: all of the work on one device.

    Args:
        values: The tensor of each replica.
        of_three_sums: Whether TensorFlow is kept from merging sums.
    """
    kept = arithmetic.shield if of_three_sums else tf.identity
    with tf.device(DEVICES[0]):
        tensors = [tf.identity(value) for value in values]

    @tf.function
    def step() -> list[tf.Tensor]:
        with tf.device(DEVICES[0]):
            total = kept(tf.add_n([kept(tensor + 1) for tensor in tensors]))
            # Grappler would merge two equal ops.
            return [tf.reduce_max(total), tf.reduce_max(total, keepdims=True)[0]]

    return step


def mirrored(values: list[tf.Tensor]) -> Reduce:
    """MirroredStrategy: its ReplicaContext.all_reduce, in strategy.run."""
    strategy = contenders.strategy_of(len(values))
    operand = strategy.experimental_distribute_values_from_function(
        lambda ctx: values[ctx.replica_id_in_sync_group]
    )

    def work(x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return tf.reduce_max(context.all_reduce("sum", x + 1))

    @tf.function
    def step() -> Any:
        return strategy.run(work, args=(operand,))

    return lambda: strategy.experimental_local_results(step())


def replicated(values: list[tf.Tensor]) -> Reduce:
    """Replicator with its defaults."""
    repl = replicator.Replicator(contenders.devices(len(values)))

    def input_fn(ctx: replicator.InputContext) -> tf.Tensor:
        return values[ctx.replica_id]

    return repl.build(lambda x: tf.reduce_max(repl.all_reduce(x + 1)), input_fn)


def measure(nbytes: int) -> dict[str, timing.Measured]:
    """Measures all contenders on tensors of one size."""
    values = allreduce.operands(nbytes, len(DEVICES))
    workers = {
        BASELINE: one_device(values),
        THREE_SUMS: one_device(values, of_three_sums=True),
        RIVAL: mirrored(values),
        OURS: replicated(values),
    }
    runs = {name: checked(reduce, values, name) for name, reduce in workers.items()}
    steps = cli.steps(allreduce.steps(nbytes))
    return timing.measure(runs, steps, cli.rounds(), warm_up=2)


def checked(reduce: Reduce, values: list[tf.Tensor], name: str) -> timing.Run:
    """Returns the timed work, after checking its results."""
    largest = float(sum(value[0] + 1 for value in values))
    if any(float(result) != largest for result in reduce()):
        cli.fail(f"{name} gives a wrong maximum")

    def step() -> float:
        return float(reduce()[0])

    return timing.in_turn(step)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of times and ratios.

    Args:
        found: `found[size][contender]` is a Measured as a dict.
    """
    names = (BASELINE, THREE_SUMS, RIVAL, OURS)
    rows = []
    for size, by_name in found.items():
        measured = {n: timing.Measured.from_json(by_name[n]) for n in names}
        rows.append(
            [
                size,
                *(time(measured[name].median) for name in names),
                f"{timing.ratio(measured[OURS], measured[BASELINE]):.2f}",
                f"{timing.ratio(measured[OURS], measured[THREE_SUMS]):.2f}",
                f"{timing.ratio(measured[RIVAL], measured[OURS]):.2f}",
                f"{measured[BASELINE].spread:.1%}",
            ]
        )
    ratios = [f"{OURS} / {BASELINE}", f"{OURS} / {THREE_SUMS}", f"{RIVAL} / {OURS}"]
    return [
        Table(
            "All-reduce between other work",
            ["size of each replica's tensor", *names, *ratios, "noise"],
            rows,
            "Median times of v + 1 on each replica, the sum, and its maximum on each.",
        )
    ]


def main(argv: list[str]) -> None:
    """Measures all sizes, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    sizes = cli.chosen(SIZES)
    if cli.QUICK.value and cli.ONLY.value is None:
        sizes = list(SIZES[:1])
    tf.get_logger().setLevel("ERROR")
    contenders.split_cpu()
    about = results.facts()
    measurements = {}
    for size in sizes:
        cli.progress(f"at_work: measuring {size} ...")
        measured = measure(allreduce.SIZES[size])
        measurements[size] = {
            name: dataclasses.asdict(measurement)
            for name, measurement in measured.items()
        }
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
