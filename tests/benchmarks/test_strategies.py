# SPDX-License-Identifier: Apache-2.0
"""Steps under every strategy."""

import pytest

from benchmarks import strategies
from benchmarks.contenders import BASELINE
from replicator import strategy
from tests.benchmarks.helpers import as_dict, refusal, results


@pytest.mark.slow
def test_all_builders_are_measured_and_compute_the_same(tmp_path):
    chosen = ("--only=small", "--onednn=off")
    printed, facts = results("benchmarks.strategies", tmp_path, *chosen)
    measurements = facts["results"]["off"]["small"]
    assert list(measurements) == [BASELINE, *strategies.BUILDERS]
    assert "nbytes" not in measurements[BASELINE]
    for name in strategies.BUILDERS:
        assert measurements[name]["nbytes"] > 0, name
        assert 0 < measurements[name]["predicted"] < 1, name
        assert name in printed
    assert measurements["PS"]["nbytes"] == measurements["PSLoadBalancing"]["nbytes"]
    # Auto decides on each variable by itself, and balances them. One owner of all saves
    # a message.
    predicted = {name: measurements[name]["predicted"] for name in strategies.BUILDERS}
    assert predicted.pop("PS") <= predicted[strategies.AUTO]
    assert predicted[strategies.AUTO] == pytest.approx(min(predicted.values()))


def test_all_builders_there_are_are_compared():
    made = {
        name
        for name in strategy.__all__
        if isinstance(kind := getattr(strategy, name), type)
        and issubclass(kind, strategy.Builder)
    }
    others = {"Builder", "Rules", "Partitioned"}  # those need custom rules
    assert made - others - set(strategies.BUILDERS) == set()


FOUND = {
    BASELINE: as_dict(0.001),
    "Mirrored": {**as_dict(0.004), "nbytes": 2048, "unknown": 0, "predicted": 0.0025},
    "PS": {**as_dict(0.002), "nbytes": 4096, "unknown": 1, "predicted": 0.001},
}


def test_the_tables_have_a_row_per_builder_and_a_column_per_network():
    measurements = {setting: {"small": FOUND} for setting in ("on", "off")}
    result_tables = strategies.tables(measurements)
    assert [table.title for table in result_tables] == [
        "Median step under each strategy, oneDNN on, in ms",
        "Predicted for keeping variables equal, oneDNN on, in ms",
        "Median step under each strategy, oneDNN off, in ms",
        "Predicted for keeping variables equal, oneDNN off, in ms",
        "Bytes communicated in a step under each strategy",
    ]
    step, said, *_, sent = result_tables
    assert {tuple(table.columns) for table in result_tables} == {
        ("", "32-64-64-10 MLP")
    }
    assert step.rows == [
        [BASELINE, "1.000"],
        ["Mirrored", "4.000 (2.00)"],
        ["PS", "2.000 (1.00)"],
        ["noise", "0.0%"],
    ]
    # The excess over PS, as predicted and as measured.
    assert said.rows == [
        ["Mirrored", "2.5 (+1.5, +2.0)"],
        ["PS", "1.0 (+0.000, +0.000)"],
    ]
    assert sent.rows == [["Mirrored", "2 KiB"], ["PS", "4 KiB+"]]


def test_what_is_unknown_is_refused():
    assert refusal(strategies, only=["none"]).startswith("error: unknown: none")
