"""Epochs of Keras' fit."""

import pytest

from benchmarks import fit
from tests.benchmarks.helpers import as_dict, refusal, results


@pytest.mark.slow
def test_all_are_measured_and_compute_the_same(tmp_path):
    printed, facts = results("benchmarks.fit", tmp_path, "--only=small")
    assert list(facts["results"]) == ["small"]
    assert list(facts["results"]["small"]) == list(fit.NAMES)
    assert "epoch of fit" in printed


def test_the_table_has_the_ratios_of_the_faster_of_ours():
    times = [0.004, 0.010, 0.005, 0.002]
    found = {"small": dict(zip(fit.NAMES, map(as_dict, times), strict=True))}
    (table,) = fit.tables(found)
    (row,) = table.rows
    assert row[:7] == ["small", "4.000", "10.0", "5.000", "2.000", "0.50", "0.20"]


def test_what_is_unknown_is_refused():
    assert refusal(fit, only=["gan"]).startswith("error: unknown: gan")
