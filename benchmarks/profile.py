# SPDX-License-Identifier: Apache-2.0
"""Predicted and measured beside one another: `python -m benchmarks.profile`.

A step on two replicas, and one of them alone, are measured as `python -m
replicator.profile` does it; what it predicts of them for 1, 2 and 4 replicas, each with
the same batch, stands beside steps of other programs on so many. All take turns. One
replica alone predicts, too, by the calibration only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import app

import replicator
from benchmarks import cli, contenders, results, workloads
from benchmarks.tables import Table, milliseconds
from benchmarks.workloads import WORKLOADS, Workload
from replicator.costs import rates, rehearsal
from replicator.profile import measure, model, parts

NAME = "profile"
NAMED = 2  # replicas, of which it is predicted
REPLICAS = (1, 2, 4)
NAMES = {w.name: w for w in WORKLOADS if w.name in ("large", "deep", "lstm")}


def make(workload: Workload) -> tuple[replicator.Replicator, Sequence[Any]]:
    """Returns a Replicator, and the step_fn and input_fn of a workload."""
    repl = replicator.Replicator(contenders.devices(NAMED))
    with repl.context():
        network = workload.make_model()
        optimizer = repl.wrap_optimizer(workloads.make_optimizer(workload, network))

    def input_fn(ctx: replicator.InputContext) -> workloads.Batch:
        size = ctx.per_replica_batch_size(workload.batch)
        with tf.device(repl.devices[ctx.replica_id]):
            return tf.nest.map_structure(tf.constant, workload.network.batch(size))

    def step_fn(batch: workloads.Batch) -> tf.Tensor:
        loss = workloads.train_step(network, optimizer, batch)
        return repl.all_reduce(loss, "mean")

    return repl, (step_fn, input_fn)


def measured(workload: Workload, steps: int, rounds: int) -> dict[str, Any]:
    """Returns what was predicted, and measured, of a workload; times in seconds.

    Args:
        workload: What is trained.
        steps: How many of each number of replicas are measured.
        rounds: How many turns each has.
    """
    calibration = rates.load(None)
    own = measure.both(lambda: make(workload))
    programs = {
        r: measure.program(lambda: make(workload), rehearsal.Rehearsal(r, NAMED))
        for r in REPLICAS
    }
    measure.alternate([*own, *programs.values()], steps, rounds)
    found, _ = measure.parts_of(*own)
    alone = alone_of(found)
    return {
        str(r): {
            "measured": programs[r].seconds,
            "predicted": model.here(found, r, calibration).step,
            "predicted by one": model.here(alone, r, calibration).step,
        }
        for r in REPLICAS
    }


def alone_of(found: parts.Measured) -> parts.Measured:
    """Returns what would be known if only one replica had been measured."""
    none = (0.0,) * len(found.rows)
    return dataclasses.replace(
        found,
        devices=found.devices[:1],
        step=found.alone,
        compute=found.alone - found.fixed,
        communication=none,
        rows=tuple(dataclasses.replace(row, group=(0,)) for row in found.rows),
    )


def error(by_name: Mapping[str, float], name: str = "predicted") -> float:
    """Returns how far a prediction is off, as a share of what was measured."""
    return by_name[name] / by_name["measured"] - 1


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of predictions and measurements.

    Args:
        found: `found[workload][replicas]` is what `measured` returned of it.
    """
    rows = [
        [
            f"{NAMES[name].title}, {number}",
            milliseconds(own["measured"]),
            milliseconds(own["predicted"]),
            f"{error(own):+.1%}",
            milliseconds(own["predicted by one"]),
            f"{error(own, 'predicted by one'):+.1%}",
        ]
        for name, by_number in found.items()
        for number, own in by_number.items()
    ]
    columns = ["network, replicas", "measured", "predicted", "off"]
    return [
        Table(
            "A step as python -m replicator.profile predicts it, in ms",
            [*columns, "from one replica", "off"],
            rows,
            f"Each replica has half of the network's batch. Predicted from {NAMED} "
            "replicas and one of them alone; from one replica: from that one and the "
            "calibration. Least times of steps that take turns.",
        )
    ]


def main(argv: list[str]) -> None:
    """Measures all networks, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    if cli.CELL.value is not None:
        contenders.split_cpu(max(REPLICAS))
        (name,) = cli.choose([cli.CELL.value], NAMES)
        of_cell = measured(NAMES[name], cli.steps(80), cli.rounds())
        print(json.dumps(of_cell))
        return
    chosen = cli.chosen(NAMES)
    about = results.facts()
    given = cli.handed_on(cli.QUICK, cli.STEPS, cli.ROUNDS)
    found = {}
    for name in chosen:
        cli.progress(f"profile: measuring {NAMES[name].title} ...")
        found[name] = cli.apart("benchmarks.profile", f"--cell={name}", *given)
    cli.finish(NAME, about, found, tables(found))


if __name__ == "__main__":
    app.run(main)
