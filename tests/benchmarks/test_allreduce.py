# SPDX-License-Identifier: Apache-2.0
"""The benchmark of all-reduce checks the timed results, and shows bandwidths."""

import numpy as np
import pytest

from benchmarks import allreduce
from tests.benchmarks.helpers import as_dict, refusal, results


@pytest.mark.slow
def test_all_contenders_are_measured_and_right(tmp_path):
    printed, facts = results("benchmarks.allreduce", tmp_path, "--only=1KiB")
    names = list(facts["results"]["1KiB"])
    assert names == [
        "added on one device",
        "MirroredStrategy",
        "Replicator",
        *(f"Replicator, {algorithm}" for algorithm in allreduce.CPU_ALGORITHMS),
    ]
    assert {"hub", "ring"} <= set(allreduce.CPU_ALGORITHMS)
    assert "All-reduce alone" in printed and "1KiB" in printed


def test_our_sums_are_right():
    values = allreduce.operands(64, 4)
    for reduce in (allreduce.added(values), allreduce.replicated(values)):
        for result in reduce():
            np.testing.assert_array_equal(result, np.full(16, 15, np.float32))
        allreduce.checked(reduce, values, "x")(1)


def test_a_wrong_sum_ends_the_program():
    values = allreduce.operands(64, 2)
    wrong = allreduce.added([values[0], values[0]])
    with pytest.raises(SystemExit, match="error: some name gives a wrong sum of 64"):
        allreduce.checked(wrong, values, "some name")


def test_the_table_shows_times_ratio_and_bandwidth():
    measurements = {
        "1MiB": {
            allreduce.BASELINE: as_dict(0.001, 0.001),
            allreduce.RIVAL: as_dict(0.004, 0.004),
            allreduce.OURS: as_dict(0.0005, 0.0005),
        }
    }
    (table,) = allreduce.tables(measurements)
    times = ["1.0 ms", "4.0 ms", "500 us"]
    assert table.rows == [["1MiB", *times, "2.10", "8.00", "0.0%"]]


def test_an_unknown_size_is_refused():
    message = refusal(allreduce, only=["1mb"])
    assert message.startswith("error: unknown: 1mb; have 1KiB, ")
