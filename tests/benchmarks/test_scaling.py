# SPDX-License-Identifier: Apache-2.0
"""Step times over the number of replicas: in processes, the batch cut into parts."""

import pytest

from benchmarks import scaling
from tests.benchmarks.helpers import as_dict, refusal, results


@pytest.mark.slow
def test_each_number_of_replicas_is_measured(tmp_path):
    _, facts = results(
        "benchmarks.scaling", tmp_path, "--only=large", "--replica_counts=1"
    )
    assert list(facts["results"]) == ["large"]
    assert list(facts["results"]["large"]) == ["1"]
    assert "Replicator" in facts["results"]["large"]["1"]


def test_the_table_has_a_row_per_number():
    measurements = {"small": {"1": {"a": as_dict(0.001)}, "4": {"a": as_dict(0.02)}}}
    (table,) = scaling.tables(measurements)
    assert table.rows == [["small, 1", "1.000"], ["small, 4", "20.0"]]


def test_wrong_numbers_are_refused():
    message = refusal(scaling, replica_counts=["1", "x"])
    assert message.startswith("error: --replica_counts=1,x: give numbers")
