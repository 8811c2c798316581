# SPDX-License-Identifier: Apache-2.0
"""Targets are judged by measurements, and say so if there are none."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import (
    at_work,
    build,
    doors,
    embedding,
    fit,
    hosts,
    memory,
    normalization,
    profile,
    steps,
    strategies,
    targets,
)
from benchmarks.contenders import BASELINE, CLONED, MIRRORED, ONE_REPLICA, OURS, RIVAL
from tests.benchmarks.helpers import by_name


def _step(ours: float, mirrored: float) -> Any:
    times = {BASELINE: 1.0, ONE_REPLICA: 1.0, RIVAL: 2.0}
    return {"off": {"deep": by_name({**times, OURS: ours, MIRRORED: mirrored})}}


def _sums(one: float, rival: float) -> Any:
    times = {BASELINE: one, at_work.THREE_SUMS: 1.0, RIVAL: rival, OURS: 1.0}
    return {"1MiB": {}, "64MiB": by_name(times)}


def _builds(total: float, passes: float | None = None) -> dict[str, Any]:
    return {"trace": total, "first_run": 0.0, "step_fn": None, "passes": passes}


_CLONES = {"1": _builds(4.0, 1.0), "2": _builds(8.0, 1.0), "32": _builds(20.0, 9.0)}
_BUILDS = {
    "deep": {
        RIVAL: {"32": _builds(140.0)},
        OURS: {"32": _builds(70.0, 3.0)},
        CLONED: _CLONES,
    },
    "small": {OURS: {"32": _builds(4.0, 0.32), "128": _builds(20.0, 2.56)}},
}
_BYTES = {
    MIRRORED: {"counted": 100, "resident": 100, "peak": 100},
    OURS: {"counted": 51, "resident": 60, "peak": 90},
}


def _fit(plain: float, rival: float) -> Any:
    return {"on": {"lstm": by_name({BASELINE: plain, RIVAL: rival, OURS: 1.0})}}


def _statistics(whole: float) -> Any:
    seconds = ((normalization.WHOLE, whole), (normalization.LOCAL, 1.0))
    return {"on": {"32": {name: {normalization.WALL: [s]} for name, s in seconds}}}


def _hosts(ours: float) -> Any:
    sums = by_name({OURS: ours, hosts.SOCKETS: 0.055, hosts.GLOO: 0.045})
    large = by_name({hosts.ONE_REMOTE: 0.03, OURS: ours, hosts.DDP: 0.48})
    return {
        hosts.WIRE: {"large": large, "64MiB": sums},
        hosts.LOOPBACK: {"64MiB": sums},
    }


def _predicted(step: float) -> Any:
    one = {"measured": 1.0, profile.PREDICTED: {"step": 1.0}}
    return {"large": {"1": one, "4": {**one, profile.PREDICTED: {"step": step}}}}


def _auto(auto: float) -> Any:
    return {"on": {"lstm": by_name({"Mirrored": 2.0, "PS": 1.0, "Auto": auto})}}


def _parts(parts: float) -> dict[str, Any]:
    return by_name({"Sharded": 1.0, "PartitionedPS": parts})


_WIRED = {hosts.WIRE: {"large": by_name({hosts.ONE_REMOTE: 0.03, OURS: 0.06})}}
# The program, what it measured, and of each target the value of what must reach it.
_JUDGED = [
    # By the default options: those of mirrored variables are only shown.
    (steps, _step(1.0, 1.3), [(1.0, True), (1.0, True), (2.0, True)]),
    (steps, _step(1.3, 1.0), [(1.3, False), (1.3, False), (2.0 / 1.3, False)]),
    (at_work, _sums(0.9, 2.1), [(1 / 0.9, True), (1.0, True), (2.1, True)]),
    (at_work, _sums(0.8, 1.9), [(1 / 0.8, False), (1.0, True), (1.9, False)]),
    (
        build,
        _BUILDS,
        [(2.0, False), (7.0, True), (0.1, True), (3 / 70, True), (2.0, False)],
    ),
    (memory, _BYTES, [(0.51, True), (0.6, False)]),
    (fit, _fit(1.0, 1.4), [(1.0, True), (1 / 1.4, True)]),
    (fit, _fit(0.9, 1.2), [(1 / 0.9, False), (1 / 1.2, False)]),
    (normalization, _statistics(1.1), [(1.1, True)]),
    (normalization, _statistics(1.2), [(1.2, False)]),
    (hosts, _hosts(0.06), [(2, True), (8, True), (12 / 11, True), (4 / 3, True)]),
    (
        hosts,
        _hosts(0.1),
        [(10 / 3, False), (4.8, False), (20 / 11, False), (20 / 9, False)],
    ),
    (hosts, _WIRED, [(2.0, True)]),  # without torch
    (profile, _predicted(1.1), [(0.1, True)]),  # the worst of both
    (profile, _predicted(0.8), [(0.2, False)]),
    (strategies, _auto(1.04), [(1.04, True)]),  # of the fastest
    (strategies, _auto(1.06), [(1.06, False)]),
    (strategies, {"off": {"wide": _parts(1.1)}}, [(1.1, True)]),
    (embedding, {"on": _parts(1.3)}, [(1.3, False)]),
    (
        doors,
        {"32": {doors.CLONED: 2.0, doors.SESSION: 3.0, doors.FUNCTION: 1.9}},
        [(1.5, False), (0.95, True)],
    ),
]


@pytest.mark.parametrize(
    ("program", "found", "expected"),
    _JUDGED,
    ids=[f"{row[0].NAME}-{k}" for k, row in enumerate(_JUDGED)],
)
def test_what_was_measured_is_judged(
    program: Any, found: Any, expected: list[tuple[float, bool]]
) -> None:
    lines = [t for t in targets.judge({program.NAME: found}) if t.values]
    for line, (value, reached) in zip(lines, expected, strict=True):
        own = {name: v for name, v in line.values.items() if name != MIRRORED}
        assert own == {next(iter(own)): pytest.approx(value)}, line.what
        assert line.reached is reached, line.what


def test_without_results_no_target_is_reached() -> None:
    lines = targets.judge({})
    assert len(lines) > 50
    assert all(target.reached is None for target in lines)
    assert {row[-1] for row in targets.table(lines).rows} == {"not measured"}
