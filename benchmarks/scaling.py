# SPDX-License-Identifier: Apache-2.0
"""The time of a step over the number of replicas: `python -m benchmarks.scaling`.

The batch stays the same and is cut into more parts, so that one device is the limit for
any number. Runs benchmarks.steps in one process per number of replicas.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

from absl import app, flags

from benchmarks import cli, results, timing
from benchmarks.tables import Table, milliseconds

_NUMBERS = flags.DEFINE_list(
    "replica_counts", ["1", "2", "4", "8"], "Numbers of replicas."
)

NAME = "scaling"
ONEDNN = "on"
STEPS = {"small": 500, "large": 30}  # of each measured network


def measure(workload: str, replicas: int) -> Any:
    """Returns the result of benchmarks.steps: `[contender]` is a Measured as a dict."""
    with tempfile.TemporaryDirectory() as folder:
        cli.run_apart(
            "benchmarks.steps",
            f"--only={workload}",
            f"--replicas={replicas}",
            f"--onednn={ONEDNN}",
            f"--results_dir={folder}",
            f"--steps={cli.steps(STEPS[workload])}",
            f"--rounds={min(cli.rounds(), 10)}",
        )
        text = (pathlib.Path(folder) / "steps.json").read_text()
        return json.loads(text)["results"][ONEDNN][workload]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of step times.

    Args:
        found: `found[workload][replicas][contender]` is a Measured as a dict.
    """
    names = list(next(iter(next(iter(found.values())).values())))
    rows = []
    for workload, by_number in found.items():
        for number, by_name in by_number.items():
            times = [timing.Measured.from_json(by_name[name]).median for name in names]
            rows.append([f"{workload}, {number}", *map(milliseconds, times)])
    return [
        Table(
            "Median step over the number of replicas, in ms",
            ["network, replicas", *names],
            rows,
            "The batch is the same for any number of replicas.",
        )
    ]


def main(argv: list[str]) -> None:
    """Measures all networks, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    names = cli.chosen(STEPS)
    numbers = cli.numbers("replica_counts", _NUMBERS.value) or []
    about = results.facts()
    measurements: dict[str, dict[str, Any]] = {}
    for workload in names:
        measurements[workload] = {}
        for number in numbers:
            cli.progress(f"scaling: measuring {workload} on {number} replicas ...")
            measurements[workload][str(number)] = measure(workload, number)
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
