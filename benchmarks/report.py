# SPDX-License-Identifier: Apache-2.0
"""Writes RESULTS.md and its plots: `python -m benchmarks.report [--quick]`.

Reads the JSON files of all programs that have run, benchmarks.peers included. Quick
results get a RESULTS.md of their own, next to them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from absl import app, flags

from benchmarks import (
    allreduce,
    at_work,
    build,
    cli,
    doors,
    embedding,
    fit,
    hosts,
    loops,
    memory,
    normalization,
    plots,
    profile,
    results,
    scaling,
    steps,
    strategies,
    targets,
    xla,
)
from benchmarks.peers import ratios

_INTO = flags.DEFINE_string(
    "into",
    None,
    "The folder that RESULTS.md and plots/ are written into; by default benchmarks, or "
    "that of the JSON files where it is not benchmarks/results.",
)

PROGRAMS: Mapping[str, ModuleType] = {
    module.NAME: module
    for module in (
        steps,
        ratios,
        scaling,
        allreduce,
        at_work,
        build,
        doors,
        memory,
        xla,
        loops,
        strategies,
        embedding,
        fit,
        normalization,
        profile,
        hosts,
    )
}

_HEAD = """# What was measured

Written by `python -m benchmarks.report`; `make bench`, `make bench-peers` and `make
bench-hosts` measure again. Times are medians over rounds in which the contenders take
turns. They say something about one machine on one day; ratios say more than times.
"""


def machine(facts: Mapping[str, Any]) -> str:
    """Returns a paragraph on the machine and date of a program's run."""
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    return (
        f"{facts['time'][:16].replace('T', ' ')} UTC, {facts['machine']}, "
        f"{facts['cores']} cores, {facts['memory'] / 2**30:.0f} GiB of memory; "
        f"load at the start {facts['load']:.2f}; {versions}."
    )


def markdown(
    measured: Mapping[str, Mapping[str, Any]], drawn: Mapping[str, list[str]]
) -> str:
    """Returns the text of RESULTS.md.

    Args:
        measured: By program, its JSON file.
        drawn: By program, the files of its plots.
    """
    by_program = {name: contents["results"] for name, contents in measured.items()}
    parts = [_HEAD, targets.table(targets.judge(by_program)).markdown()]
    for name, contents in measured.items():
        parts += [
            table.markdown() for table in PROGRAMS[name].tables(contents["results"])
        ]
        parts += [f"![{file}](plots/{file})\n" for file in drawn.get(name, ())]
        parts.append(f"*{name}: {machine(contents)}*\n")
    return "\n".join(parts)


def main(argv: list[str]) -> None:
    """Reads the available results and writes the report."""
    cli.refuse_arguments(argv)
    folder = cli.results_dir()
    files = {name: results.read(folder, name) for name in PROGRAMS}
    measured = {
        name: contents for name, contents in files.items() if contents is not None
    }
    if not measured:
        cli.fail(f"{folder} holds no results; run python -m benchmarks first")
    complete = folder == cli.FOLDER / "results"
    into = pathlib.Path(_INTO.value or (cli.FOLDER if complete else folder))
    by_program = {name: contents["results"] for name, contents in measured.items()}
    drawn = plots.draw(by_program, into / "plots")
    (into / "RESULTS.md").write_text(markdown(measured, drawn))
    targets.table(targets.judge(by_program)).show()
    cli.progress(f"written to {into / 'RESULTS.md'}")


if __name__ == "__main__":
    app.run(main)
