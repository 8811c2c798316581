# SPDX-License-Identifier: Apache-2.0
"""Steps under every strategy."""

import pytest

from benchmarks import strategies
from benchmarks.contenders import BASELINE
from replicator import strategy
from tests.benchmarks.helpers import as_dict, refusal, results


@pytest.mark.slow
def test_all_builders_are_measured_and_compute_the_same(tmp_path):
    printed, facts = results("benchmarks.strategies", tmp_path, "--only=small")
    found = facts["results"]["small"]
    assert list(found) == [BASELINE, *strategies.BUILDERS]
    assert "nbytes" not in found[BASELINE]
    for name in strategies.BUILDERS:
        assert found[name]["nbytes"] > 0, name
        assert name in printed
    assert found["PS"]["nbytes"] == found["PSLoadBalancing"]["nbytes"]


def test_all_builders_there_are_are_compared():
    made = {
        name
        for name in strategy.__all__
        if isinstance(kind := getattr(strategy, name), type)
        and issubclass(kind, strategy.Builder)
    }
    others = {"Builder", "Rules", "Partitioned"}  # those are given rules of one's own
    assert made - others - set(strategies.BUILDERS) == set()


def test_the_tables_have_a_row_per_builder_and_a_column_per_network():
    names = ["Mirrored", "PS"]
    times = [0.004, 0.002]
    own = {
        name: as_dict(seconds) | {"nbytes": 2048 * (k + 1), "unknown": k}
        for k, (name, seconds) in enumerate(zip(names, times, strict=True))
    }
    found = {"small": {BASELINE: as_dict(0.001), **own}}
    step, sent = strategies.tables(found)
    assert step.columns == sent.columns == ["", "32-64-64-10 MLP"]
    assert step.rows == [
        [BASELINE, "1.000"],
        ["Mirrored", "4.000 (2.00)"],
        ["PS", "2.000 (1.00)"],
        ["noise", "0.0%"],
    ]
    assert sent.rows == [["Mirrored", "2 KiB"], ["PS", "4 KiB+"]]


def test_what_is_unknown_is_refused():
    assert refusal(strategies, only=["none"]).startswith("error: unknown: none")
