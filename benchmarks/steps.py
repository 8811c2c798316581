"""The time of a training step: `python -m benchmarks.steps [--only=small,deep]`."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import app, flags

from benchmarks import cli, contenders, results, timing, workloads
from benchmarks.contenders import BASELINE, OURS, RIVAL, SHARDED
from benchmarks.tables import Table, milliseconds

_REPLICAS = flags.DEFINE_integer("replicas", 2, "How many replicas.", lower_bound=1)

NAME = "steps"
WARM_UP = 5  # steps before timing, whose losses are compared
CONTENDERS = (OURS, SHARDED)
NAMES = {workload.name: workload for workload in workloads.WORKLOADS}


def measure(workload: workloads.Workload, replicas: int) -> dict[str, timing.Measured]:
    """Measures all contenders on one workload.

    Args:
        workload: What is trained.
        replicas: How many share the batch.
    """
    weights = contenders.initial_weights(workload)
    prepared = {
        name: timing.in_turn(make(workload, replicas, weights))
        for name, make in contenders.factories(*CONTENDERS).items()
    }
    del weights
    measured = timing.measure(
        prepared, cli.steps(workload.steps), cli.rounds(), WARM_UP
    )
    alike = [
        name for name in measured if not (workload.batch_norm and name == BASELINE)
    ]
    if not timing.agree(measured, alike):
        losses = {name: measured[name].losses for name in alike}
        cli.fail(f"{workload.title}: contenders compute different losses, {losses}")
    return measured


def from_json(by_name: Mapping[str, Any]) -> dict[str, timing.Measured]:
    """Returns what was measured on one workload."""
    return {name: timing.Measured.from_json(m) for name, m in by_name.items()}


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the tables of step times, and of first calls.

    Args:
        found: `found[workload][contender]` is a Measured as a dict.
    """
    measured = {NAMES[name].title: from_json(found[name]) for name in found}
    ours = [n for n in CONTENDERS if any(n in by_name for by_name in measured.values())]
    names = [BASELINE, RIVAL, *ours]
    ratios = [*((name, BASELINE) for name in ours), *((RIVAL, name) for name in ours)]
    steps = Table(
        "Median step, in ms",
        ["", *names, *(f"{a} / {b}" for a, b in ratios), "noise"],
        [
            [
                title,
                *(milliseconds(m[name].median) for name in names),
                *(f"{timing.ratio(m[a], m[b]):.2f}" for a, b in ratios),
                f"{m[BASELINE].spread:.1%}",
            ]
            for title, m in measured.items()
        ],
        "Ratios are medians over rounds. Noise: how far apart the middle half of the "
        "rounds on one device lies.",
    )
    first = Table(
        "First call, in s",
        ["", *names],
        [
            [title, *(f"{m[name].first_call:.2f}" for name in names)]
            for title, m in measured.items()
        ],
        "Traces and builds the step, and runs it once.",
    )
    return [steps, first]


def noise(found: Mapping[str, Any]) -> float:
    """Returns the median noise over all workloads."""
    return statistics.median(from_json(m)[BASELINE].spread for m in found.values())


def main(argv: list[str]) -> None:
    """Measures what the flags ask for, prints the tables and writes the JSON file."""
    cli.refuse_arguments(argv)
    chosen = cli.chosen(NAMES)
    tf.get_logger().setLevel("ERROR")  # MirroredStrategy tells of each all-reduce
    contenders.split_cpu(_REPLICAS.value)
    about = results.facts()
    found = {}
    for name in chosen:
        cli.progress(f"steps: measuring {NAMES[name].title} ...")
        measured = measure(NAMES[name], _REPLICAS.value)
        found[name] = {who: dataclasses.asdict(one) for who, one in measured.items()}
        gc.collect()  # the models: the largest take gigabytes
    cli.finish(NAME, about, found, tables(found))


if __name__ == "__main__":
    app.run(main)
