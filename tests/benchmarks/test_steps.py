# SPDX-License-Identifier: Apache-2.0
"""The benchmark of steps runs, is fair, and prints its measurements."""

import pytest

from benchmarks import cli, contenders, steps
from tests.benchmarks.helpers import as_dict, call, refusal, results


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Measures the smallest network: (printed output, JSON)."""
    folder = tmp_path_factory.mktemp("x")
    return results("benchmarks.steps", folder, "--only=small", "--onednn=off")


NAMES = list(contenders.factories(*steps.CONTENDERS))


def test_all_contenders_compute_the_same_losses(small):
    _, facts = small
    losses = [facts["results"]["off"]["small"][name]["losses"] for name in NAMES]
    assert len(losses[0]) == steps.WARM_UP
    assert losses[0][-1] < losses[0][0]  # each step uses the previous update
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_json_says_what_was_measured_on_what(small):
    _, facts = small
    measured = facts["results"]["off"]["small"]
    assert list(measured) == NAMES
    for name in NAMES:
        assert len(measured[name]["rounds"]) == 2
    assert {"command", "time", "machine", "cores", "load", "versions"} <= set(facts)
    assert facts["command"][:3] == ["python", "-m", "benchmarks.steps"]


def test_tables_have_a_column_for_each_contender(small):
    printed, _ = small
    for heading in (
        *NAMES,
        "noise",
        "Median step with oneDNN off, in ms",
        "32-64-64-10 MLP",
    ):
        assert heading in printed


def test_tables_show_medians_ratios_and_noise():
    by_name = {
        "one device": as_dict(0.001, 0.001, 0.001),
        "MirroredStrategy": as_dict(0.006, 0.004, 0.004),
        "Replicator, one replica": as_dict(0.0005, 0.0005, 0.001),
        "Replicator": as_dict(0.002, 0.002, 0.001),
    }
    step, first, *off = steps.tables({s: {"small": by_name} for s in ("on", "off")})
    times = ["32-64-64-10 MLP", "1.000", "4.000", "0.500", "2.000"]
    assert step.rows == [[*times, "0.50", "2.00", "4.00", "3.00", "0.0%"]]
    assert step.columns[5:9] == [
        "Replicator, one replica / one device",
        "Replicator / one device",
        "Replicator / Replicator, one replica",
        "MirroredStrategy / Replicator",
    ]
    assert first.rows == [["32-64-64-10 MLP", *4 * ["1.00"]]]
    assert [table.title for table in off] == [
        "Median step with oneDNN off, in ms",
        "First call with oneDNN off, in s",
    ]


def test_oneDNN_is_on_or_off_in_the_process_that_measures(monkeypatch):
    seen = []
    monkeypatch.setattr(
        cli,
        "run_apart",
        lambda *args, environment: seen.append((args[1], environment)) or "{}",
    )
    monkeypatch.setattr(steps, "tables", lambda found: [])
    monkeypatch.setattr(cli, "finish", lambda *args: None)
    call(steps, only=["small"], onednn=["off", "on"])
    assert seen == [
        ("--cell=small", {"TF_ENABLE_ONEDNN_OPTS": "1"}),
        ("--cell=small", {"TF_ENABLE_ONEDNN_OPTS": "0"}),
    ]


def test_an_unknown_workload_is_refused_with_the_names_there_are():
    names = "small, large, deep, resnet20, lstm, wide"
    assert refusal(steps, only=["smal"]) == f"error: unknown: smal; have {names}"
