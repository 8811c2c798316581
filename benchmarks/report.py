"""What comes out of a run: tables for people, a JSON file for comparing runs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys
from collections.abc import Mapping

import keras
import rich.table
import tensorflow as tf

import replicator
from benchmarks import timing
from benchmarks.workloads import WORKLOADS

BASELINE, RIVAL, OURS = "one device", "MirroredStrategy", "Replicator"
# Ratios that are shown: how many times as long the first takes as the second.
RATIOS = ((RIVAL, OURS), (OURS, BASELINE))

Results = Mapping[str, Mapping[str, timing.Measured]]


def step_table(results: Results) -> rich.table.Table:
    """Returns the table of step times.

    Args:
        results: `results[workload][contender]` is what was measured.
    """
    table = rich.table.Table(
        title="Median step, in ms",
        caption="Ratios are medians over rounds. Noise: how far the middle half of the "
        "rounds on one device lies apart.",
    )
    table.add_column("workload")
    for name in (BASELINE, RIVAL, OURS, *map(" / ".join, RATIOS), "noise"):
        table.add_column(name, justify="right")
    for workload, measured in results.items():
        table.add_row(
            workload,
            *(f"{measured[name].median * 1e3:.3f}" for name in (BASELINE, RIVAL, OURS)),
            *(f"{timing.ratio(measured[a], measured[b]):.2f}" for a, b in RATIOS),
            f"{measured[BASELINE].spread:.1%}",
        )
    return table


def build_table(results: Results) -> rich.table.Table:
    """Returns the table of first calls, which trace and build the step."""
    table = rich.table.Table(title="First call, in s")
    table.add_column("workload")
    for name in (BASELINE, RIVAL, OURS):
        table.add_column(name, justify="right")
    for workload, measured in results.items():
        names = (BASELINE, RIVAL, OURS)
        table.add_row(workload, *(f"{measured[n].first_call:.2f}" for n in names))
    return table


def as_json(results: Results) -> str:
    """Returns all results, and what they were measured on, as JSON; in seconds."""
    facts = {
        "command": ["python", "-m", "benchmarks", *sys.argv[1:]],
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "devices": [device.name for device in tf.config.list_logical_devices()],
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "replicator": getattr(replicator, "__version__", None),
        },
        "workloads": {
            w.name: {"per_replica_batch": w.per_replica_batch}
            for w in WORKLOADS
            if w.name in results
        },
        "results": {
            workload: {
                **{name: dataclasses.asdict(one) for name, one in measured.items()},
                "ratios": {
                    f"{a} / {b}": timing.ratio(measured[a], measured[b])
                    for a, b in RATIOS
                },
            }
            for workload, measured in results.items()
        },
    }
    return json.dumps(facts, indent=2)


def write(results: Results, folder: pathlib.Path) -> pathlib.Path:
    """Writes the JSON into `folder`, named by the time; returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(as_json(results) + "\n")
    return path
