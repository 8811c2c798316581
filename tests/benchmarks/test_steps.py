"""The benchmark of steps runs, is fair, and prints what it measured."""

import pytest

from benchmarks import contenders, steps
from tests.benchmarks.helpers import as_dict, refusal, results


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Measures the smallest network: (what is printed, the JSON)."""
    return results("benchmarks.steps", tmp_path_factory.mktemp("x"), "--only=small")


NAMES = list(contenders.factories(*steps.CONTENDERS))


def test_all_contenders_compute_the_same_losses(small):
    _, facts = small
    losses = [facts["results"]["small"][name]["losses"] for name in NAMES]
    assert len(losses[0]) == steps.WARM_UP
    assert losses[0][-1] < losses[0][0]  # each step takes up what the last one updated
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_json_says_what_was_measured_on_what(small):
    _, facts = small
    assert list(facts["results"]["small"]) == NAMES
    for name in NAMES:
        assert len(facts["results"]["small"][name]["rounds"]) == 2
    assert {"command", "time", "machine", "cores", "load", "versions"} <= set(facts)
    assert facts["command"][:3] == ["python", "-m", "benchmarks.steps"]


def test_tables_have_a_column_for_each_contender(small):
    printed, _ = small
    for heading in (*NAMES, "noise", "Median step, in ms", "32-64-64-10 MLP"):
        assert heading in printed


def test_tables_show_medians_ratios_and_noise():
    by_name = {
        "one device": as_dict(0.001, 0.001, 0.001),
        "MirroredStrategy": as_dict(0.006, 0.004, 0.004),
        "Replicator": as_dict(0.002, 0.002, 0.001),
    }
    step, first = steps.tables({"small": by_name})
    title = "32-64-64-10 MLP"
    assert step.rows == [[title, "1.000", "4.000", "2.000", "2.00", "3.00", "0.0%"]]
    assert step.columns[4:6] == [
        "Replicator / one device",
        "MirroredStrategy / Replicator",
    ]
    assert first.rows == [[title, "1.00", "1.00", "1.00"]]


def test_an_unknown_workload_is_refused_with_the_names_there_are():
    names = "small, large, deep, resnet20, lstm, wide"
    assert refusal(steps, only=["smal"]) == f"error: unknown: smal; have {names}"
