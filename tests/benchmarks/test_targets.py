# SPDX-License-Identifier: Apache-2.0
"""Targets are judged by measurements, and say so if there are none."""

import dataclasses

import pytest

from benchmarks import (
    at_work,
    build,
    doors,
    embedding,
    fit,
    hosts,
    memory,
    profile,
    steps,
    strategies,
    targets,
)
from benchmarks.contenders import BASELINE, CLONED, MIRRORED, ONE_REPLICA, OURS, RIVAL
from tests.benchmarks.helpers import as_dict


def judged(found):
    return {target.what: target for target in targets.judge(found)}


def test_without_results_no_target_is_reached():
    lines = judged({})
    of_steps = 2 * 3 * len(targets.STEPS) + 2 * len(strategies.NETWORKS)
    assert len(lines) == of_steps + 9 + 2 * 2 * len(fit.BATCHES) + 18
    assert all(target.reached is None for target in lines.values())
    rows = targets.table(list(lines.values())).rows
    assert {row[-1] for row in rows} == {"not measured"}


@pytest.mark.parametrize(
    ("ours", "mirrored", "reached"), [(1.0, 1.3, True), (1.3, 1.0, False)]
)
def test_a_step_is_judged_with_the_default_options(ours, mirrored, reached):
    names = {OURS: ours, MIRRORED: mirrored}
    times = {BASELINE: 1.0, ONE_REPLICA: 1.0, RIVAL: 2.0, **names}
    measurements = {"deep": {name: as_dict(time) for name, time in times.items()}}
    lines = judged({steps.NAME: {"off": measurements}})
    of_one = lines["100-layer MLP, oneDNN off: of one device"]
    assert of_one.bound == 1.05 and of_one.reached is reached
    of_replica = lines["100-layer MLP, oneDNN off: of one replica"]
    assert of_replica.bound == 1.2 and of_replica.reached is reached
    faster = lines["100-layer MLP, oneDNN off: times faster than MirroredStrategy"]
    assert faster.values == {OURS: 2.0 / ours, MIRRORED: 2.0 / mirrored}
    assert faster.reached is (2.0 / ours >= 1.9)
    on = lines["100-layer MLP, oneDNN on: of one device"]
    assert on.reached is None


@pytest.mark.parametrize(
    ("one", "rival", "reached"),
    [(0.9, 2.1, [True, True]), (0.8, 1.9, [False, False])],
)
def test_all_reduce_is_judged_at_64_mib(one, rival, reached):
    by_name = {BASELINE: as_dict(one), RIVAL: as_dict(rival), OURS: as_dict(1.0)}
    measurements = {at_work.NAME: {"1MiB": {}, "64MiB": by_name}}
    lines = [target for target in targets.judge(measurements) if target.values]
    assert [target.reached for target in lines] == reached


def built(total, passes=None):
    return dataclasses.asdict(build.Built(total, 0.0, None, passes))


def test_builds_are_judged():
    measurements = {
        "deep": {
            RIVAL: {"32": built(140.0)},
            OURS: {"32": built(70.0, 3.0)},
            CLONED: {
                "1": built(4.0, 1.0),
                "2": built(8.0, 1.0),
                "32": built(20.0, 9.0),
            },
        },
        "small": {OURS: {"32": built(4.0, 0.32), "128": built(20.0, 2.56)}},
    }
    lines = [t for t in targets.judge({build.NAME: measurements}) if t.values]
    assert [(t.reached, round(min(t.values.values()), 3)) for t in lines] == [
        (False, 2.0),
        (True, 7.0),
        (True, 0.1),
        (True, 0.043),
        (False, 2.0),
    ]


def test_memory_is_judged_by_both_kinds_of_bytes():
    measurements = {
        MIRRORED: {"counted": 100, "resident": 100, "peak": 100},
        OURS: {"counted": 51, "resident": 60, "peak": 90},
    }
    lines = [t for t in targets.judge({memory.NAME: measurements}) if t.values]
    assert [target.reached for target in lines] == [True, False]


@pytest.mark.parametrize(
    ("plain", "rival", "reached"),
    [(1.0, 1.4, [True, True]), (0.9, 1.2, [False, False])],
)
def test_epochs_of_fit_are_judged(plain, rival, reached):
    times = {BASELINE: plain, RIVAL: rival, OURS: 1.0}
    measurements = {
        fit.NAME: {"on": {"lstm": {n: as_dict(t) for n, t in times.items()}}}
    }
    lines = [t for t in targets.judge(measurements) if t.values]
    assert [target.reached for target in lines] == reached


@pytest.mark.parametrize(("ours", "reached"), [(0.06, True), (0.1, False)])
def test_hosts_are_judged_by_the_link_that_was_measured(ours, reached):
    times = {hosts.ONE_REMOTE: 0.03, OURS: ours, hosts.DDP: 0.48}
    alone = {OURS: ours, hosts.SOCKETS: 0.055, hosts.GLOO: 0.045}
    measurements = {
        hosts.WIRE: {
            "large": {n: as_dict(t) for n, t in times.items()},
            "64MiB": {n: as_dict(t) for n, t in alone.items()},
        },
        hosts.LOOPBACK: {"64MiB": {n: as_dict(t) for n, t in alone.items()}},
    }
    lines = [t for t in targets.judge({hosts.NAME: measurements}) if t.values]
    assert [target.reached for target in lines] == [reached] * 4
    assert lines[1].values == {OURS: 0.48 / ours}


def test_without_torch_the_targets_that_need_it_are_not_measured():
    by_name = {hosts.ONE_REMOTE: as_dict(0.03), OURS: as_dict(0.06)}
    measurements = {hosts.NAME: {hosts.WIRE: {"large": by_name}}}
    (line,) = [target for target in targets.judge(measurements) if target.values]
    assert line.what == "1024-2048x3-10 MLP, two hosts, 1 Gbit/s: of one remote device"


@pytest.mark.parametrize(("predicted", "reached"), [(1.1, True), (0.8, False)])
def test_a_prediction_is_judged_by_the_worst_of_it(predicted, reached):
    steps = {
        "1": {"measured": 1.0, profile.PREDICTED: {"step": 1.0}},
        "4": {"measured": 1.0, profile.PREDICTED: {"step": predicted}},
    }
    line = judged({profile.NAME: {"large": steps}})[
        "predicted step, 1024-2048x3-10 MLP: off by"
    ]
    assert line.reached is reached
    assert line.values == {OURS: pytest.approx(abs(predicted - 1))}


@pytest.mark.parametrize(("auto", "reached"), [(1.04, True), (1.06, False)])
def test_auto_is_judged_by_the_fastest_builder(auto, reached):
    by_name = {"Mirrored": as_dict(2.0), "PS": as_dict(1.0), "Auto": as_dict(auto)}
    lines = judged({strategies.NAME: {"on": {"lstm": by_name}}})
    on = lines["strategy Auto, LSTM language model, oneDNN on: of the fastest builder"]
    assert on.values == {OURS: auto} and on.reached is reached
    off = "strategy Auto, LSTM language model, oneDNN off: of the fastest builder"
    assert lines[off].reached is None


@pytest.mark.parametrize(("parts", "reached"), [(1.1, True), (1.3, False)])
def test_variables_in_parts_are_judged_by_whole_ones(parts, reached):
    by_name = {"Sharded": as_dict(1.0), "PartitionedPS": as_dict(parts)}
    lines = judged({strategies.NAME: {"off": {"wide": by_name}}})
    title = f"{steps.NAMES['wide'].title}, oneDNN off: PartitionedPS, of Sharded"
    assert lines[title].values == {OURS: parts}
    assert lines[title].reached is reached
    lines = judged({embedding.NAME: {"on": by_name}})
    title = f"{embedding.WORKLOAD.title}, oneDNN on: PartitionedPS, of Sharded"
    assert lines[title].values == {OURS: parts}
    assert lines[title].reached is reached


def test_doors_are_judged_by_cloning():
    measurements = {"32": {doors.CLONED: 2.0, doors.SESSION: 3.0, doors.FUNCTION: 1.9}}
    lines = [t for t in targets.judge({doors.NAME: measurements}) if t.values]
    assert [target.reached for target in lines] == [False, True]
