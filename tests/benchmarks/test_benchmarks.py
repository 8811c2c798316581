"""The benchmarks run, are fair, and print what they measured; no time is asserted."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest
from rich.console import Console

from benchmarks import contenders, report, timing, workloads

REPOSITORY = pathlib.Path(__file__).parents[2]


def measured(*rounds):
    return timing.Measured(first_call=1.0, losses=(2.0,), rounds=rounds)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Runs the smallest benchmark in a process of its own: (what it prints, its JSON).

    A process may have one MirroredStrategy only, and other tests may have made theirs.
    """
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "benchmarks", "--only=small", "--steps=4"]
    finished = subprocess.run(
        [*command, "--rounds=2", "--warm_up=4", f"--output_dir={folder}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    (path,) = folder.iterdir()
    return finished.stdout, json.loads(path.read_text())


def test_all_contenders_compute_the_same_losses(small):
    _, facts = small
    ours = facts["results"]["small"]
    losses = [ours[name]["losses"] for name in contenders.CONTENDERS]
    assert len(losses[0]) == 4
    assert losses[0][-1] < losses[0][0]  # each step takes up what the last one updated
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_json_says_what_was_measured_on_what(small):
    _, facts = small
    assert set(facts["results"]["small"]) == {*contenders.CONTENDERS, "ratios"}
    for name in contenders.CONTENDERS:
        assert len(facts["results"]["small"][name]["rounds"]) == 2
    assert {"command", "machine", "cores", "devices", "versions"} <= set(facts)


def test_tables_have_a_column_for_each_contender_and_ratio(small):
    printed, _ = small
    for heading in (*contenders.CONTENDERS, "noise", "Median step, in ms", "small"):
        assert heading in printed


def test_step_table_shows_medians_ratios_and_noise():
    results = {
        "any": {
            "one device": measured(0.001, 0.001, 0.001),
            "MirroredStrategy": measured(0.006, 0.004, 0.004),
            "Replicator": measured(0.002, 0.002, 0.001),
        }
    }
    console = Console(width=120, record=True)
    console.print(report.step_table(results))
    row = next(line for line in console.export_text().splitlines() if "any" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells == ["any", "1.000", "4.000", "2.000", "3.00", "2.00", "0.0%"]


def test_measure_gives_every_contender_the_same_turns():
    calls = []
    steps = {name: lambda name=name: calls.append(name) or 1.0 for name in "ab"}
    results = timing.measure(steps, steps=6, rounds=3, warm_up=2)
    assert calls.count("a") == calls.count("b") == 2 + 3 * (1 + 2)
    assert [len(one.rounds) for one in results.values()] == [3, 3]
    assert results["a"].losses == (1.0, 1.0)


@pytest.mark.parametrize(
    ("rounds", "spread"),
    [((2.0,), 0.0), ((2.0, 2.0, 2.0), 0.0), ((1.0, 2.0, 3.0), 0.5)],
)
def test_spread_is_the_middle_half_over_the_median(rounds, spread):
    assert measured(*rounds).spread == pytest.approx(spread)


def test_workloads_have_names_of_their_own_and_repeatable_batches():
    assert len({w.name for w in workloads.WORKLOADS}) == len(workloads.WORKLOADS)
    workload = dataclasses.replace(workloads.WORKLOADS[0], per_replica_batch=3)
    first, again = workload.batches(2), workload.batches(2)
    assert first[0][0].shape == (3, *workload.input_shape)
    assert (first[1][0] == again[1][0]).all()
    assert not (first[0][0] == first[1][0]).all()


def test_unknown_workload_is_refused_with_the_names_there_are():
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--only=smal"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode != 0
    assert "smal" in finished.stderr + finished.stdout
    assert "small, large, deep, resnet20" in finished.stderr + finished.stdout
