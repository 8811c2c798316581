# SPDX-License-Identifier: Apache-2.0
"""Predicted steps beside measured ones."""

import pytest

from benchmarks import profile
from tests.benchmarks.helpers import refusal, results


@pytest.mark.slow
def test_a_network_is_measured_on_each_number_of_replicas(tmp_path):
    printed, facts = results("benchmarks.profile", tmp_path, "--only=deep")
    assert "100-layer MLP, 4" in printed
    found = facts["results"]["deep"]
    assert list(found) == ["1", "2", "4"]
    assert all(seconds > 0 for own in found.values() for seconds in own.values())


def test_the_table_says_how_far_off_a_prediction_is():
    steps = {"measured": 0.01, "predicted": 0.011, "predicted by one": 0.005}
    (table,) = profile.tables({"large": {"4": steps}})
    (row,) = table.rows
    assert row[1:] == ["10.0", "11.0", "+10.0%", "5.000", "-50.0%"]


def test_an_unknown_network_is_refused():
    assert refusal(profile, only=["gan"]).startswith("error: unknown: gan")
