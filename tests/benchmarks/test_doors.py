# SPDX-License-Identifier: Apache-2.0
"""The time until the first result through each door."""

import pytest

from benchmarks import doors
from tests.benchmarks.helpers import results


@pytest.mark.slow
def test_all_doors_are_measured_and_compute_the_same(tmp_path):
    printed, facts = results("benchmarks.doors", tmp_path)
    assert list(facts["results"]["2"]) == list(doors.DOORS)
    for name in doors.DOORS:
        assert name in printed


def test_the_table_says_how_each_door_compares_with_cloning():
    seconds = {doors.CLONED: 2.0, doors.SESSION: 3.0, doors.FUNCTION: 1.0}
    (table,) = doors.tables(
        {"8": seconds, "32": {name: 2 * s for name, s in seconds.items()}}
    )
    assert table.rows == [
        [doors.CLONED, "2.0", "4.0", "1.00", "1.00"],
        [doors.SESSION, "3.0", "6.0", "1.50", "1.50"],
        [doors.FUNCTION, "1.0", "2.0", "0.50", "0.50"],
    ]
