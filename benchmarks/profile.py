# SPDX-License-Identifier: Apache-2.0
"""Predicted and measured step times side by side: `python -m benchmarks.profile`.

Measures a step on two replicas, and on one of them alone, as `python -m
replicator.profile` does. Its predictions for 1, 2 and 4 replicas, each with the same
batch, stand beside the measured steps of other programs with as many. All take turns. A
second prediction uses only the one replica and the calibration.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import app

import replicator
from benchmarks import cli, contenders, results, workloads
from benchmarks.tables import Table, milliseconds
from benchmarks.workloads import WORKLOADS, Workload
from replicator.costs import rates, rehearsal
from replicator.profile import measure, model
from replicator.step.steps import Step

NAME = "profile"
NAMED = 2  # replicas of the profiled step
REPLICAS = (1, 2, 4)
PREDICTED, BY_ONE = "predicted", "predicted by one"
NAMES = {w.name: w for w in WORKLOADS if w.name in ("large", "deep", "lstm")}


def make(workload: Workload) -> Step:
    """Returns the step of a workload."""
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

    return repl.build(step_fn, input_fn)


def measured(workload: Workload, steps: int, rounds: int) -> dict[str, Any]:
    """Returns a workload's predictions and measurements; times in seconds.

    Args:
        workload: The workload to train.
        steps: How many steps of each number of replicas are measured.
        rounds: How many turns each has.
    """
    whole = measure.whole(lambda: make(workload))
    alone = measure.single_replica(lambda: make(workload), whole)
    programs = {
        r: measure.program(lambda: make(workload), rehearsal.Rehearsal(r, NAMED))
        for r in REPLICAS
    }
    measure.alternate([whole, alone, *programs.values()], steps, rounds)
    known = rates.load(None)
    calibration, _ = measure.calibrated(whole.devices, known)
    by_two, by_one = (
        {r: model.on_these_devices(found, r, own) for r in REPLICAS}
        for found, own in (
            (measure.parts_of(whole, alone)[0], calibration),
            (measure.parts_of(alone, alone)[0], known),
        )
    )
    return {
        str(r): {
            "measured": programs[r].seconds,
            PREDICTED: dataclasses.asdict(by_two[r]),
            BY_ONE: dataclasses.asdict(by_one[r]),
        }
        for r in REPLICAS
    }


def error(own: Mapping[str, Any], name: str = PREDICTED) -> float:
    """Returns a prediction's error, as a share of the measured time."""
    return own[name]["step"] / own["measured"] - 1


def cells(own: Mapping[str, Any], name: str) -> list[str]:
    """Returns a table's cells for a prediction.

    Args:
        own: The measurement and its predictions.
        name: PREDICTED or BY_ONE.
    """
    step, low, high = (own[name][key] for key in ("step", "low", "high"))
    within = "" if low <= own["measured"] <= high else ", missed"
    bounds = f"{milliseconds(low)} - {milliseconds(high)}{within}"
    return [milliseconds(step), f"{error(own, name):+.1%}", bounds]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of predictions and measurements.

    Args:
        found: `found[workload][replicas]` is the result of `measured`.
    """
    rows = [
        [
            f"{NAMES[name].title}, {number}",
            milliseconds(own["measured"]),
            *cells(own, PREDICTED),
            *cells(own, BY_ONE),
        ]
        for name, by_number in found.items()
        for number, own in by_number.items()
    ]
    columns = ["network, replicas", "measured"]
    columns += ["predicted", "off", "between", "from one replica", "off", "between"]
    return [
        Table(
            "A step as python -m replicator.profile predicts it, in ms",
            columns,
            rows,
            f"Each replica has half of the network's batch. Predicted from {NAMED} "
            "replicas and one of them alone; from one replica: from that one and the "
            "default calibration. Times are what a twentieth of all steps stay below; "
            "programs take turns.",
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
    names = cli.chosen(NAMES)
    about = results.facts()
    arguments = cli.handed_on(cli.QUICK, cli.STEPS, cli.ROUNDS)
    measurements = {}
    for name in names:
        cli.progress(f"profile: measuring {NAMES[name].title} ...")
        measurements[name] = cli.apart(
            "benchmarks.profile", f"--cell={name}", *arguments
        )
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
