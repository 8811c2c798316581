# SPDX-License-Identifier: Apache-2.0
"""Epochs of Keras' fit."""

import pytest

from benchmarks import fit
from tests.benchmarks.helpers import as_dict, refusal, results


@pytest.mark.slow
def test_all_are_measured_and_compute_the_same(tmp_path):
    printed, facts = results("benchmarks.fit", tmp_path, "--only=small")
    assert list(facts["results"]) == ["on", "off"]
    for by_workload in facts["results"].values():
        assert list(by_workload) == ["small"] and list(by_workload["small"]) == list(
            fit.NAMES
        )
    assert "epoch of fit" in printed


def test_the_table_has_the_ratios_to_the_others():
    times = [0.4, 1.0, 0.3]
    small = dict(zip(fit.NAMES, map(as_dict, times), strict=True))
    measurements = {"off": {"small": small}}
    (table,) = fit.tables(measurements)
    (row,) = table.rows
    assert row[1:7] == ["1000", "400.0", "1000.0", "300.0", "0.75", "0.30"]


def test_what_is_unknown_is_refused():
    assert refusal(fit, only=["gan"]).startswith("error: unknown: gan")
