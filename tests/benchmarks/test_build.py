# SPDX-License-Identifier: Apache-2.0
"""The benchmark of builds breaks down the time."""

import dataclasses

import pytest

from benchmarks import build, contenders, networks, workloads
from tests.benchmarks.helpers import refusal, results

TINY = workloads.Workload(
    "tiny", "tiny", networks.Perceptron(4, 4, 1), workloads.mlp, 4, 1
)


@pytest.mark.parametrize("options", contenders.OPTIONS.values(), ids=contenders.OPTIONS)
def test_the_parts_of_a_build_make_the_whole(options):
    built = build.build_replicated(TINY, 2, **options)
    assert built.step_fn > 0 and built.passes > 0 and built.first_run > 0
    assert built.step_fn + built.passes < built.trace
    assert built.total == built.trace + built.first_run


@pytest.mark.slow
def test_builds_are_measured_in_processes_of_their_own(tmp_path):
    printed, facts = results("benchmarks.build", tmp_path, "--build_counts=2")
    measurements = facts["results"]["small"]
    contenders = [
        n for n in build.QUICK["small"] if n in ("one device", "MirroredStrategy")
    ]
    assert list(measurements) == [
        *contenders,
        *(n for n in build.OPTIONS if n in measurements),
    ]
    assert {"Replicator"} <= set(measurements)
    assert list(measurements["Replicator"]) == ["2"] and list(
        measurements["one device"]
    ) == ["1"]
    assert "Until the first result, small MLP, in s" in printed


def as_dict(total, passes=None):
    step_fn = None if passes is None else total / 2
    return dataclasses.asdict(build.Built(total - 1, 1.0, step_fn, passes))


def test_tables_show_totals_and_shares():
    measurements = {
        "deep": {
            "one device": {"1": as_dict(3.0)},
            "Replicator": {
                "1": as_dict(4.0, 0.4),
                "2": as_dict(6.0, 0.6),
                "12": as_dict(26.0, 2.6),
            },
        }
    }
    totals, shares = build.tables(measurements)
    assert totals.columns == ["replicas", "1", "2", "12", "each further / first"]
    assert totals.rows == [
        ["one device", "3.0", "", "", ""],
        ["Replicator", "4.0", "6.0", "26.0", "0.50"],
    ]
    last = shares.rows[-1]
    assert last[:5] == ["deep, Replicator, 12", "13.00", "2.60", "9.40", "1.00"]
    assert last[5:] == ["10.0%", "217"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"build_counts": ["two"]}, "error: --build_counts=two: give numbers from 1"),
        ({"only": ["large"]}, "error: unknown: large; have deep, small"),
    ],
)
def test_wrong_flags_are_refused(flags, said):
    assert refusal(build, **flags).startswith(said)
