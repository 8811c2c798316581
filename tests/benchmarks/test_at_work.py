# SPDX-License-Identifier: Apache-2.0
"""All-reduce between other work is measured, checked, and shown."""

import pytest

from benchmarks import allreduce, at_work
from tests.benchmarks.helpers import as_dict, refusal, results


def test_all_contenders_are_measured(tmp_path):
    printed, facts = results("benchmarks.at_work", tmp_path)
    names = ["one device", "MirroredStrategy", "Replicator"]
    assert list(facts["results"]["1MiB"]) == names
    assert "All-reduce between other work" in printed


def test_ours_and_the_limit_do_the_same():
    values = allreduce.operands(64, 2)
    for make in (at_work.one_device, at_work.replicated):
        assert [float(result) for result in make(values)()] == [5.0, 5.0]
        at_work.checked(make(values), values, "x")(1)


def test_a_wrong_maximum_ends_the_program():
    values = allreduce.operands(64, 2)
    wrong = at_work.one_device([values[0], values[0]])
    with pytest.raises(SystemExit, match="error: some name gives a wrong maximum"):
        at_work.checked(wrong, values, "some name")


def test_the_table_shows_times_and_ratios():
    measured = {
        at_work.BASELINE: as_dict(0.001, 0.001),
        at_work.RIVAL: as_dict(0.004, 0.004),
        at_work.OURS: as_dict(0.002, 0.002),
    }
    (table,) = at_work.tables({"1MiB": measured})
    times = ["1.0 ms", "4.0 ms", "2.0 ms"]
    assert table.rows == [["1MiB", *times, "2.00", "2.00", "0.0%"]]


def test_an_unknown_size_is_refused():
    message = refusal(at_work, only=["1mb"])
    assert message == "error: unknown: 1mb; have 1MiB, 64MiB"
