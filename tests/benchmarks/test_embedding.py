# SPDX-License-Identifier: Apache-2.0
"""A large embedding with Adam, split and whole."""

import pytest

from benchmarks import embedding
from benchmarks.contenders import BASELINE
from tests.benchmarks.helpers import as_dict, refusal, results


@pytest.mark.slow
def test_builders_are_measured_and_compute_the_same(tmp_path):
    printed, facts = results("benchmarks.embedding", tmp_path, "--onednn=off")
    measurements = facts["results"]["off"]
    assert list(measurements) == [BASELINE, *embedding.BUILDERS]
    assert all(name in printed for name in measurements)


def test_the_table_compares_parts_with_whole_variables():
    names = (BASELINE, *embedding.BUILDERS)
    by_name = {name: as_dict(0.001 * (n + 1)) for n, name in enumerate(names)}
    (table,) = embedding.tables({"on": by_name})
    assert table.columns[1:-2] == [*names]
    assert table.rows == [
        ["oneDNN on", "1.000", "2.000", "3.000", "4.000", "1.33", "0.0%"]
    ]


def test_an_unknown_setting_is_refused():
    assert refusal(embedding, onednn=["x"]) == "error: unknown: x; have on, off"
