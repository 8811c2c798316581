# SPDX-License-Identifier: Apache-2.0
"""Steps with XLA and without."""

import pytest

from benchmarks import xla
from tests.benchmarks.helpers import as_dict, refusal, results


@pytest.mark.slow
def test_both_are_measured_and_compute_the_same(tmp_path):
    printed, facts = results("benchmarks.xla", tmp_path, "--only=small")
    assert list(facts["results"]) == ["small"]
    names = ["one device", "one device, XLA", "Replicator", "Replicator, XLA"]
    assert list(facts["results"]["small"]) == names
    assert "with XLA" in printed


def test_the_table_has_ratios_of_each_with_xla_to_itself_without():
    names = ["one device", "one device, XLA", "Replicator", "Replicator, XLA"]
    times = [0.004, 0.002, 0.005, 0.001]
    measurements = {"small": dict(zip(names, map(as_dict, times), strict=True))}
    (table,) = xla.tables(measurements)
    (row,) = table.rows
    assert row[0] == "small"
    assert row[5:7] == ["0.50", "0.20"]


def test_what_is_unknown_is_refused():
    assert refusal(xla, only=["lstm"]).startswith("error: unknown: lstm")
