# SPDX-License-Identifier: Apache-2.0
"""The report shows and plots the existing measurements."""

from __future__ import annotations

import pathlib

from absl import flags
from absl.testing import flagsaver

from benchmarks import allreduce, build, report, results, scaling, steps
from benchmarks.contenders import BASELINE, OURS, RIVAL
from benchmarks.peers import ratios
from tests.benchmarks.helpers import as_dict, by_name

_NAMES = (BASELINE, RIVAL, OURS)
_MEASURED = {name: as_dict(0.001, 0.002) for name in (*_NAMES, allreduce.BASELINE)}
_BUILT = {"trace": 1.0, "first_run": 1.0, "step_fn": None, "passes": None}
_FOUND = {
    steps.NAME: {"on": {"deep": _MEASURED}},
    ratios.NAME: {"torch": {"deep": by_name({"one device": 1.0, "DDP": 2.0})}},
    scaling.NAME: {"deep": {"1": _MEASURED, "2": _MEASURED}},
    allreduce.NAME: {"1KiB": _MEASURED, "64MiB": _MEASURED},
    build.NAME: {"deep": {name: {"1": _BUILT, "32": _BUILT} for name in _NAMES}},
}


def test_there_are_a_table_and_a_plot_of_everything_measured(
    tmp_path: pathlib.Path,
) -> None:
    facts = results.facts()
    for name, found in _FOUND.items():
        results.write(tmp_path, name, facts, found)
    with flagsaver.flagsaver():
        report.main(flags.FLAGS(["program", f"--results_dir={tmp_path}"]))
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.startswith("# What was measured\n")
    for title in (
        "Targets",
        "Median step with oneDNN on, in ms",
        "Peers, in ms",
        "Median step over the number of replicas, in ms",
        "All-reduce alone",
        "Until the first result, deep MLP, in s",
    ):
        assert f"\n## {title}\n" in text
    assert "| DDP | 1000.0 | 2000.0 | 2.00 |" in text
    assert "Adam's slots, 2 replicas" not in text  # has not run
    assert f"{facts['machine']}, {facts['cores']} cores" in text
    assert facts["time"][:10] in text and "tensorflow" in text
    for name in ("networks", "steps-deep", "allreduce", "build-deep"):
        assert f"](plots/{name}.svg)" in text
        svg = (tmp_path / "plots" / f"{name}.svg").read_text()
        assert svg.startswith("<?xml")
        dark = svg.count("prefers-color-scheme: dark")
        assert dark == (name == "networks")  # it is shown in pages
