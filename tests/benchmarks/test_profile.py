# SPDX-License-Identifier: Apache-2.0
"""Predicted steps beside measured ones."""

import pytest

from benchmarks import profile
from tests.benchmarks.helpers import refusal, results


@pytest.mark.slow
def test_a_network_is_measured_on_each_number_of_replicas(tmp_path):
    printed, facts = results("benchmarks.profile", tmp_path, "--only=deep")
    assert "100-layer MLP, 4" in printed
    measurements = facts["results"]["deep"]
    assert list(measurements) == ["1", "2", "4"]
    for measurement in measurements.values():
        assert measurement["measured"] > 0
        for name in (profile.PREDICTED, profile.BY_ONE):
            assert (
                0
                < measurement[name]["low"]
                <= measurement[name]["step"]
                <= measurement[name]["high"]
            )


def _found(step: float, low: float, high: float) -> dict[str, float]:
    return {"step": step, "low": low, "high": high}


def test_the_table_says_how_far_off_a_prediction_is():
    steps = {
        "measured": 0.01,
        profile.PREDICTED: _found(0.011, 0.009, 0.012),
        profile.BY_ONE: _found(0.005, 0.004, 0.006),
    }
    (table,) = profile.tables({"large": {"4": steps}})
    (row,) = table.rows
    assert row[1:5] == ["10.0", "11.0", "+10.0%", "9.000 - 12.0"]
    assert row[5:] == ["5.000", "-50.0%", "4.000 - 6.000, missed"]


def test_an_unknown_network_is_refused():
    assert refusal(profile, only=["gan"]).startswith("error: unknown: gan")
