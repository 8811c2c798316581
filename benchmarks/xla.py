# SPDX-License-Identifier: Apache-2.0
"""A step compiled by XLA: `python -m benchmarks.xla [--only=small,deep]`.

A function with jit_compile=True holds the forward and the backward pass, without
communication; the optimizer and the replicas' communication stay outside.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping
from typing import Any

from absl import app

from benchmarks import cli, contenders, results, timing, workloads
from benchmarks.contenders import BASELINE, OURS
from benchmarks.tables import Table, milliseconds

NAME = "xla"
WARM_UP = 5
REPLICAS = 2
STEPS = {"small": 1000, "large": 30, "deep": 200}  # of each measured network


def measure(workload: workloads.Workload) -> dict[str, timing.Measured]:
    """Measures one device and Replicator on one workload, each with XLA and without."""
    compiled = dataclasses.replace(workload, compiled=True)
    weights = contenders.initial_weights(workload)
    factories = contenders.factories(OURS)
    prepared = {
        name + suffix: timing.in_turn(factories[name](variant, REPLICAS, weights))
        for name in (BASELINE, OURS)
        for suffix, variant in (("", workload), (", XLA", compiled))
    }
    steps = cli.steps(STEPS[workload.name])
    measured = timing.measure(prepared, steps, cli.rounds(), WARM_UP)
    if not timing.agree(measured, list(measured)):
        losses = {name: variant.losses for name, variant in measured.items()}
        cli.fail(f"{workload.title}: contenders compute different losses, {losses}")
    return measured


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of step times.

    Args:
        found: `found[workload][contender]` is a Measured as a dict.
    """
    measured = {
        network: {
            name: timing.Measured.from_json(fields) for name, fields in by_name.items()
        }
        for network, by_name in found.items()
    }
    names = list(next(iter(measured.values())))
    rows = [
        [
            network,
            *(milliseconds(by_name[name].median) for name in names),
            *(
                f"{timing.ratio(by_name[f'{name}, XLA'], by_name[name]):.2f}"
                for name in (BASELINE, OURS)
            ),
            f"{by_name[BASELINE].spread:.1%}",
        ]
        for network, by_name in measured.items()
    ]
    ratios = [f"{name}: with XLA / without" for name in (BASELINE, OURS)]
    return [
        Table(
            "Median step with XLA, in ms",
            ["network", *names, *ratios, "noise"],
            rows,
            f"{REPLICAS} replicas; XLA compiles the forward and the backward pass.",
        )
    ]


def main(argv: list[str]) -> None:
    """Measures all networks, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    chosen = cli.chosen(STEPS)
    contenders.split_cpu(REPLICAS)
    about = results.facts()
    measurements = {}
    for workload in workloads.WORKLOADS:
        if workload.name in chosen:
            cli.progress(f"xla: measuring {workload.title} ...")
            measured = measure(workload)
            measurements[workload.name] = {
                name: dataclasses.asdict(one) for name, one in measured.items()
            }
            gc.collect()
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
