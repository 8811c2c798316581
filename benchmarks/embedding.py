# SPDX-License-Identifier: Apache-2.0
"""A large embedding with Adam, split and whole: `python -m benchmarks.embedding`.

Adam updates all of its 1,000,000 rows in each step: all on each replica, all on the
owner, or half on each of two replicas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from absl import app

from benchmarks import cli, contenders, results, steps, strategies, timing, workloads
from benchmarks.contenders import BASELINE
from benchmarks.tables import Table, milliseconds
from replicator import strategy

NAME = "embedding"
WORKLOAD = workloads.EMBEDDING
WHOLE, PARTS = strategy.Sharded.__name__, strategy.PartitionedPS.__name__
BUILDERS = (strategy.Mirrored.__name__, WHOLE, PARTS)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of step times.

    Args:
        found: `found[setting][builder]` is the result of `strategies.measure`.
    """
    rows = []
    for setting, by_name in found.items():
        measured = strategies.from_json(by_name)
        names = (BASELINE, *BUILDERS)
        rows.append(
            [
                f"oneDNN {setting}",
                *(milliseconds(measured[name].median) for name in names),
                f"{timing.ratio(measured[PARTS], measured[WHOLE]):.2f}",
                f"{measured[BASELINE].spread:.1%}",
            ]
        )
    return [
        Table(
            f"Median step of a {WORKLOAD.title}, in ms",
            ["", BASELINE, *BUILDERS, f"{PARTS} / {WHOLE}", "noise"],
            rows,
            f"{strategies.REPLICAS} replicas, of which each is given half of the "
            f"{WORKLOAD.batch} examples.",
        )
    ]


def main(argv: list[str]) -> None:
    """Measures with oneDNN and without, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    if cli.CELL.value is not None:
        contenders.split_cpu(strategies.REPLICAS)
        count = cli.steps(WORKLOAD.steps)
        print(json.dumps(strategies.measure(WORKLOAD, count, BUILDERS)))
        return
    about = results.facts()
    arguments = cli.handed_on(cli.QUICK, cli.STEPS, cli.ROUNDS)
    measurements = {}
    for setting in cli.choose(steps.ONEDNN.value, steps.SETTINGS):
        cli.progress(f"embedding: measuring with oneDNN {setting} ...")
        environment = {"TF_ENABLE_ONEDNN_OPTS": steps.SETTINGS[setting]}
        cell = ("benchmarks.embedding", f"--cell={NAME}", *arguments)
        measurements[setting] = cli.apart(*cell, environment=environment)
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
