# SPDX-License-Identifier: Apache-2.0
"""The report shows and plots the existing measurements."""

import pytest

from benchmarks import allreduce, build, report, results, scaling, steps
from benchmarks.peers import ratios
from tests.benchmarks.helpers import as_dict, call, refusal

NAMES = ("one device", "MirroredStrategy", "Replicator")
MEASURED = {name: as_dict(0.001, 0.002) for name in NAMES}
BUILT = {"trace": 1.0, "first_run": 1.0, "step_fn": None, "passes": None}
FOUND = {
    steps.NAME: {"on": {"deep": MEASURED}},
    ratios.NAME: {"torch": {"deep": {"one device": as_dict(1.0), "DDP": as_dict(2.0)}}},
    scaling.NAME: {"deep": {"1": MEASURED, "2": MEASURED}},
    allreduce.NAME: {
        size: {**MEASURED, allreduce.BASELINE: as_dict(0.1, 0.2)}
        for size in ("1KiB", "64MiB")
    },
    build.NAME: {"deep": {name: {"1": BUILT, "32": BUILT} for name in NAMES}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a report of some results."""
    folder = tmp_path_factory.mktemp("results")
    for name, found in FOUND.items():
        results.write(folder, name, results.facts(), found)
    call(report, results_dir=str(folder))
    return folder


def test_there_is_a_table_of_everything_measured(folder):
    text = (folder / "RESULTS.md").read_text()
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


def test_the_machine_is_named(folder):
    text = (folder / "RESULTS.md").read_text()
    facts = results.read(folder, steps.NAME)
    assert f"{facts['machine']}, {facts['cores']} cores" in text
    assert facts["time"][:10] in text and "tensorflow" in text


def test_plots_are_drawn_and_shown(folder):
    text = (folder / "RESULTS.md").read_text()
    for name in ("networks", "steps-deep", "allreduce", "build-deep"):
        assert f"](plots/{name}.svg)" in text
        assert (folder / "plots" / f"{name}.svg").read_text().startswith("<?xml")


def test_the_plot_of_networks_has_colors_for_dark_pages(folder):
    svg = (folder / "plots" / "networks.svg").read_text()
    assert svg.count("<style>:root") == 1 and "prefers-color-scheme: dark" in svg
    assert "fill: var(--c0)" in svg and "fill: var(--c1)" in svg


def test_without_results_there_is_one_line(tmp_path):
    message = refusal(report, results_dir=str(tmp_path))
    assert (
        message == f"error: {tmp_path} holds no results; run python -m benchmarks first"
    )
    assert not list(tmp_path.iterdir())
