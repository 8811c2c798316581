# SPDX-License-Identifier: Apache-2.0
"""The time of a training step: `python -m benchmarks.steps [--only=small,deep]`.

Measures each network in its own process, with TensorFlow's oneDNN kernels and without,
since TensorFlow's default depends on the processor.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from absl import app, flags

from benchmarks import cli, contenders, results, timing, workloads
from benchmarks.contenders import BASELINE, MIRRORED, ONE_REPLICA, OURS, RIVAL
from benchmarks.tables import Table, milliseconds

_REPLICAS = flags.DEFINE_integer("replicas", 2, "How many replicas.", lower_bound=1)
ONEDNN = flags.DEFINE_list("onednn", None, "on, off, or by default both.")

NAME = "steps"
WARM_UP = 5  # steps before timing, whose losses are compared
CONTENDERS = (ONE_REPLICA, OURS, MIRRORED)
# Values of TF_ENABLE_ONEDNN_OPTS.
SETTINGS = {"on": "1", "off": "0"}
NAMES = {workload.name: workload for workload in workloads.WORKLOADS}


def measure(workload: workloads.Workload, replicas: int) -> dict[str, timing.Measured]:
    """Measures all contenders on one workload.

    Args:
        workload: The workload to train.
        replicas: The number of replicas that share the batch.
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
    comparable = [
        name
        for name in measured
        if not (workload.batch_norm and name in (BASELINE, ONE_REPLICA))
    ]
    if not timing.agree(measured, comparable):
        losses = {name: measured[name].losses for name in comparable}
        cli.fail(f"{workload.title}: contenders compute different losses, {losses}")
    return measured


def from_json(by_name: Mapping[str, Any]) -> dict[str, timing.Measured]:
    """Returns the measurements of one workload."""
    return {name: timing.Measured.from_json(m) for name, m in by_name.items()}


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the tables of step times and of first calls, for each oneDNN setting.

    Args:
        found: `found[setting][workload][contender]` is a Measured as a dict.
    """
    result = []
    for setting, by_workload in found.items():
        measured = {NAMES[n].title: from_json(m) for n, m in by_workload.items()}
        result += [_steps(setting, measured), _first_calls(setting, measured)]
    return result


def _steps(setting: str, measured: Mapping[str, dict[str, timing.Measured]]) -> Table:
    names = _contenders(measured)
    ours = [name for name in names if name in CONTENDERS]
    ratios = [
        *((name, BASELINE) for name in ours),
        *((name, ONE_REPLICA) for name in ours if name != ONE_REPLICA),
        *((RIVAL, name) for name in ours if name != ONE_REPLICA),
    ]
    ratios = [(a, b) for a, b in ratios if {a, b} <= set(names)]
    return Table(
        f"Median step with oneDNN {setting}, in ms",
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
        "rounds on one device lies. One replica has the whole batch: what two of them "
        "take beyond it is what replication costs.",
    )


def _first_calls(
    setting: str, measured: Mapping[str, dict[str, timing.Measured]]
) -> Table:
    names = _contenders(measured)
    return Table(
        f"First call with oneDNN {setting}, in s",
        ["", *names],
        [
            [title, *(f"{m[name].first_call:.2f}" for name in names)]
            for title, m in measured.items()
        ],
        "Traces and builds the step, and runs it once.",
    )


def _contenders(measured: Mapping[str, dict[str, timing.Measured]]) -> list[str]:
    """Returns the names of the measured contenders, in order."""
    names = (BASELINE, RIVAL, *CONTENDERS)
    return [n for n in names if any(n in by_name for by_name in measured.values())]


def main(argv: list[str]) -> None:
    """Measures what the flags ask for, prints the tables and writes the JSON file."""
    cli.refuse_arguments(argv)
    if cli.CELL.value is not None:
        tf.get_logger().setLevel("ERROR")  # MirroredStrategy logs each all-reduce
        contenders.split_cpu(_REPLICAS.value)
        (name,) = cli.choose([cli.CELL.value], NAMES)
        measured = measure(NAMES[name], _REPLICAS.value)
        print(
            json.dumps(
                {
                    n: dataclasses.asdict(measurement)
                    for n, measurement in measured.items()
                }
            )
        )
        return
    settings = cli.choose(ONEDNN.value, SETTINGS)
    names = cli.chosen(NAMES)
    about = results.facts()
    measurements = apart(NAME, names, settings, _REPLICAS)
    cli.finish(NAME, about, measurements, tables(measurements))


def apart(
    program: str,
    chosen: Iterable[str],
    settings: Iterable[str],
    *more: flags.FlagHolder,
) -> dict[str, dict[str, Any]]:
    """Measures each workload and oneDNN setting in a process of its own.

    Args:
        program: The program that measures the workload that --cell names.
        chosen: The names of the workloads.
        settings: A choice of SETTINGS.
        *more: Further flags that are passed to the process.

    Returns:
        `found[setting][workload]` is the output of the process.
    """
    arguments = cli.handed_on(*more, cli.QUICK, cli.STEPS, cli.ROUNDS)
    measurements: dict[str, dict[str, Any]] = {}
    chosen = list(chosen)
    for setting in settings:
        environment = {"TF_ENABLE_ONEDNN_OPTS": SETTINGS[setting]}
        measurements[setting] = {}
        for name in chosen:
            title = NAMES[name].title
            cli.progress(f"{program}: measuring {title} with oneDNN {setting} ...")
            cell = (f"benchmarks.{program}", f"--cell={name}", *arguments)
            measurements[setting][name] = cli.apart(*cell, environment=environment)
    return measurements


if __name__ == "__main__":
    app.run(main)
