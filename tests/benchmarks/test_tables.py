# SPDX-License-Identifier: Apache-2.0
"""Ratios in tables are those that their columns name, of what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import (
    allreduce,
    at_work,
    build,
    doors,
    embedding,
    fit,
    hosts,
    loops,
    memory,
    normalization,
    profile,
    scaling,
    steps,
    strategies,
    xla,
)
from benchmarks.contenders import BASELINE, MIRRORED, ONE_REPLICA, OURS, RIVAL
from benchmarks.peers import ratios
from benchmarks.tables import Table, milliseconds, size
from tests.benchmarks.helpers import as_dict, by_name


def _built(trace: float, step_fn: float | None, passes: float | None) -> dict[str, Any]:
    return {"trace": trace, "first_run": 1.0, "step_fn": step_fn, "passes": passes}


def _predicted(step: float, low: float, high: float) -> dict[str, float]:
    return {"step": step, "low": low, "high": high}


_BUILDS = {"1": _built(3.0, 2.0, 0.4), "2": _built(5.0, 3.0, 0.6)}
_BUILDS["12"] = _built(25.0, 13.0, 2.6)
_STRATEGIES = {
    BASELINE: as_dict(0.001),
    "Mirrored": {**as_dict(0.004), "nbytes": 2048, "unknown": 0, "predicted": 0.0025},
    "PS": {**as_dict(0.002), "nbytes": 4096, "unknown": 1, "predicted": 0.001},
}
_STATISTICS = {
    normalization.WHOLE: {"wall": [0.3, 0.2, 0.6], "processor": [0.2] * 3},
    normalization.LOCAL: {"wall": [0.2, 0.2, 0.2], "processor": [0.1] * 3},
}
_HOSTS = {hosts.ONE_REMOTE: 0.03, OURS: 0.06, hosts.MIRRORED: 0.09, hosts.DDP: 0.48}
_XLA = {BASELINE: 0.004, f"{BASELINE}, XLA": 0.002, OURS: 0.005, f"{OURS}, XLA": 0.001}
_MLP, _LARGE = "32-64-64-10 MLP", "1024-2048x3-10 MLP"
# The program, what it measured, and its tables: rows of cells.
_TABLES: list[tuple[Any, Any, list[list[str]]]] = [
    (
        allreduce,
        {"1MiB": by_name({allreduce.BASELINE: 0.001, RIVAL: 0.004, OURS: 0.0005})},
        [["1MiB, 1.0 ms, 4.0 ms, 500 us, 2.10, 8.00, 0.0%"]],
    ),
    (
        at_work,
        {
            "1MiB": by_name(
                {BASELINE: 1e-3, at_work.THREE_SUMS: 2e-3, RIVAL: 6e-3, OURS: 2e-3}
            )
        },
        [["1MiB, 1.0 ms, 2.0 ms, 6.0 ms, 2.0 ms, 2.00, 1.00, 3.00, 0.0%"]],
    ),
    (
        build,
        {"deep": {OURS: _BUILDS}},
        [
            ["Replicator, 4.0, 6.0, 26.0, 0.50"],
            [
                "deep, Replicator, 1, 2.00, 0.40, 0.60, 1.00, 10.0%, 400",
                "deep, Replicator, 2, 3.00, 0.60, 1.40, 1.00, 10.0%, 300",
                "deep, Replicator, 12, 13.00, 2.60, 9.40, 1.00, 10.0%, 217",
            ],
        ],
    ),
    (
        doors,
        {"8": {doors.CLONED: 2.0, doors.SESSION: 3.0, doors.FUNCTION: 1.0}},
        [
            [
                f"{doors.CLONED}, 2.0, 1.00",
                f"{doors.SESSION}, 3.0, 1.50",
                f"{doors.FUNCTION}, 1.0, 0.50",
            ]
        ],
    ),
    (
        embedding,
        {
            "on": by_name(
                {n: k for k, n in enumerate((BASELINE, *embedding.BUILDERS), 1)}
            )
        },
        [["oneDNN on, 1000.0, 2000.0, 3000.0, 4000.0, 1.33, 0.0%"]],
    ),
    (
        fit,
        {"off": {"small": by_name({BASELINE: 0.4, RIVAL: 1.0, OURS: 0.3})}},
        [[f"{_MLP}, 1000, 400.0, 1000.0, 300.0, 0.75, 0.30, 0.0%"]],
    ),
    (
        hosts,
        {
            "1gbit": {
                "large": by_name(_HOSTS),
                "64MiB": by_name({OURS: 0.6, hosts.SOCKETS: 0.5}),
            }
        },
        [
            [f"{_LARGE}, 30.0, 60.0, 90.0, 480.0, 2.00, 3.00, 8.00, 0.0%"],
            ["64MiB, 500.0, 600.0, 1.20, 0.0%"],
        ],
    ),
    (
        loops,
        {"1000": by_name({loops.LOOP: 0.03, loops.UNROLLED: 0.01})},
        [["1,000, 300.0, 100.0, 3.00, 0.0%"]],
    ),
    (
        memory,
        {
            OURS: {"counted": 51, "resident": 60, "peak": 90},
            MIRRORED: {"counted": 100, "resident": 100, "peak": 100},
        },
        [
            [
                "Replicator, 51 B, 60 B, 90 B, 0.51, 0.60, 0.90",
                "Replicator, mirrored, 100 B, 100 B, 100 B, 1.00, 1.00, 1.00",
            ]
        ],
    ),
    (
        normalization,
        {"off": {"32": _STATISTICS}},
        [["32 examples, oneDNN off, 300.0, 200.0, 1.50, 200.0, 100.0, 2.00"]],
    ),
    (
        profile,
        {
            "large": {
                "4": {
                    "measured": 0.01,
                    profile.PREDICTED: _predicted(0.011, 0.009, 0.012),
                    profile.BY_ONE: _predicted(0.005, 0.004, 0.006),
                }
            }
        },
        [
            [
                f"{_LARGE}, 4, 10.0, 11.0, +10.0%, 9.000 - 12.0, "
                "5.000, -50.0%, 4.000 - 6.000, missed"
            ]
        ],
    ),
    (
        ratios,
        {
            "torch": {"deep": by_name({"one device": 0.001, "DDP": 0.003})},
            "JAX": {"deep": by_name({"one device": 0.03, "pmap": 0.03})},
        },
        [
            [
                "deep, JAX, pmap, 30.0, 30.0, 1.00, 0.0%",
                "deep, torch, DDP, 1.000, 3.000, 3.00, 0.0%",
            ]
        ],
    ),
    (
        scaling,
        {"small": {n: by_name({"a": int(n) / 1000}) for n in ("1", "20")}},
        [["small, 1, 1.000", "small, 20, 20.0"]],
    ),
    (
        steps,
        {
            "on": {
                "small": by_name(
                    {BASELINE: 0.001, RIVAL: 0.004, ONE_REPLICA: 0.0005, OURS: 0.002}
                )
            }
        },
        [
            [f"{_MLP}, 1.000, 4.000, 0.500, 2.000, 0.50, 2.00, 4.00, 2.00, 0.0%"],
            [f"{_MLP}, 1.00, 1.00, 1.00, 1.00"],
        ],
    ),
    (
        strategies,
        {"on": {"small": _STRATEGIES}},
        [
            [
                f"{BASELINE}, 1.000",
                "Mirrored, 4.000 (2.00)",  # of the fastest
                "PS, 2.000 (1.00)",
                "noise, 0.0%",
            ],
            # The excess over PS, as predicted and as measured.
            ["Mirrored, 2.5 (+1.5, +2.0)", "PS, 1.0 (+0.000, +0.000)"],
            ["Mirrored, 2 KiB", "PS, 4 KiB+"],  # and what is unknown
        ],
    ),
    (
        xla,
        {"small": by_name(_XLA)},
        [["small, 4.000, 2.000, 5.000, 1.000, 0.50, 0.20, 0.0%"]],
    ),
]


@pytest.mark.parametrize(
    ("program", "found", "expected"), _TABLES, ids=[row[0].NAME for row in _TABLES]
)
def test_ratios_are_what_the_columns_say(
    program: Any, found: Any, expected: list[list[str]]
) -> None:
    tables = program.tables(found)
    assert [[", ".join(row) for row in table.rows] for table in tables] == expected
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)


def test_the_columns_of_ratios_name_both() -> None:
    found = by_name({BASELINE: 1.0, RIVAL: 1.0, ONE_REPLICA: 1.0, OURS: 1.0})
    assert steps.tables({"on": {"small": found}})[0].columns[5:9] == [
        "Replicator, one replica / one device",
        "Replicator / one device",
        "Replicator / Replicator, one replica",
        "MirroredStrategy / Replicator",
    ]


def test_a_table_is_the_same_in_markdown_and_in_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table("Title", ["", "a", "b"], [["x", "1", "2"]], "What it is.")
    assert table.markdown() == (
        "## Title\n\nWhat it is.\n\n"
        "|  | a | b |\n| --- | ---: | ---: |\n| x | 1 | 2 |\n"
    )
    table.show()
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("Title", "What it is.", "a", "x", "1", "2"))


def test_numbers_have_few_digits_and_the_right_unit() -> None:
    times = [milliseconds(seconds) for seconds in (0.0001234, 0.00999, 0.0123)]
    assert times == ["0.123", "9.990", "12.3"]
    sizes = [size(nbytes) for nbytes in (12, 1024, 1536, 3 << 40)]
    assert sizes == ["12 B", "1 KiB", "1.5 KiB", "3072 GiB"]
