# SPDX-License-Identifier: Apache-2.0
"""Calls of replicas that two processes build pair as those that one process builds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator import errors
from replicator.graph.ir.placeholder import Call, Value
from replicator.graph.matching import elsewhere, gradients, levels, match
from replicator.graph.matching.elsewhere import Elsewhere, ReplicaReport
from replicator.world import World
from tests.cluster import as_threads
from tests.graph.matching.test_match import call

# Per communication: the replicas that take part, and the sizes of its operands.
Drawn = list[tuple[tuple[int, ...], tuple[int | None, ...]]]


@st.composite
def programs(draw: st.DrawFn) -> tuple[tuple[int, ...], Drawn]:
    """The process of each replica, and what the replicas communicate in order."""
    processes = (*draw(st.permutations([0, 1])), *draw(st.lists(st.integers(0, 1))))
    processes = processes[:5]
    members = st.sets(st.sampled_from(range(len(processes))), min_size=1)
    sizes = st.lists(st.sampled_from([None, 1, 3]), min_size=1, max_size=3)
    drawn = draw(st.lists(st.tuples(members.map(sorted), sizes), max_size=6))
    return processes, [(tuple(group), tuple(size)) for group, size in drawn]


def calls_of(replicas: int, drawn: Drawn) -> list[list[Call]]:
    """Returns each replica's calls; those of each group are numbered in order."""
    made: list[list[Call]] = [[] for _ in range(replicas)]
    counts: dict[tuple[int, ...], int] = {}
    for group, sizes in drawn:
        number = counts[group] = counts.get(group, -1) + 1
        channel = "" if len(group) == replicas else f"{','.join(map(str, group))}:"
        values = tuple(Value("float32", (size,)) for size in sizes)
        for r in group:
            made[r].append(call(f"{channel}{number}", r, group=group, values=values))
    return made


def report(
    calls: Sequence[Call],
    paths: dict[str, str] | None = None,
    waits: Sequence[tuple[int, int]] = (),
) -> ReplicaReport:
    """Returns what is reported of a replica, whose calls are all at the top level."""
    stops = [("call", [c.key], c.site(), []) for c in calls]
    level = levels.LevelReport(stops, lambda: list(waits))
    return ReplicaReport(list(calls), paths or {}, [level], {}, gradients.Passes())


def checked(processes: Sequence[int], reports: Sequence[ReplicaReport]) -> list[Any]:
    """Returns what each of the two processes finds, or raises."""

    def check(peers: Any) -> Elsewhere:
        devices = [f"/job:w/task:{process}" for process in processes]
        world = World.divided(processes, peers.process, devices)
        mine = [reports[r] for r in world.local]
        return elsewhere.check(peers, world, mine, "builds f")

    with pytest.MonkeyPatch.context() as patch:
        as_threads.fake_store(patch)
        return as_threads.together(check, check)


@given(programs())
def test_both_processes_find_the_same_with_keys_that_never_meet(
    program: tuple[tuple[int, ...], Drawn],
) -> None:
    processes, drawn = program
    calls = calls_of(len(processes), drawn)
    one, other = checked(processes, [report(of_replica) for of_replica in calls])
    assert (one.first, one.groups) == (other.first, other.groups)
    assert (
        one.calls
        == other.calls
        == {
            key: {c.replica_id: c for c in sum(calls, []) if c.key == key}
            for key in {c.key for c in sum(calls, [])}
        }
    )
    crossing = {
        key: one.processes([*of_key])
        for key, of_key in one.calls.items()
        if len(one.processes([*of_key])) > 1
    }
    assert one.first.keys() == crossing.keys()
    assert one.groups.keys() == {*crossing.values(), (0, 1)}
    taken = [
        number
        for key, first in one.first.items()
        for number in range(first, first + one.offset(key, 1))
    ]
    assert len(set(taken)) == len(taken)


@given(programs(), st.randoms(use_true_random=False))
def test_both_processes_refuse_what_one_process_refuses(
    program: tuple[tuple[int, ...], Drawn], random: Any
) -> None:
    processes, drawn = program
    calls = calls_of(len(processes), drawn)
    of_replica = random.choice(calls)
    if not of_replica:
        return
    place = random.randrange(len(of_replica))
    if random.random() < 0.5:
        del of_replica[place]
    else:
        changed = {"options": {"op": "max"}, "line": "train.py:9 in step_fn"}
        of_replica[place] = dataclasses.replace(of_replica[place], **changed)
    try:
        match.check(calls)
        expected = None  # a group of one replica
    except errors.MismatchError as error:
        expected = str(error)
    for found in checked(processes, [report(of_replica) for of_replica in calls]):
        if expected is None:
            assert isinstance(found, Elsewhere)
        else:
            assert isinstance(found, errors.MismatchError)
            assert str(found) == expected


def test_different_places_in_the_control_flow_are_refused() -> None:
    inside = report([call("0", 0)], {"0": "/conditional 1"})
    for found in checked([0, 1], [inside, report([call("0", 1)])]):
        assert isinstance(found, errors.MismatchError)
        for part in ("inside a conditional on replica 0", "the top level on replica 1"):
            assert part in str(found)
    other_branch = report([call("0", 1)], {"0": "/function 0/conditional 0"})
    for found in checked([0, 1], [inside, other_branch]):
        for part in ("in conditional 1 on", "in function 0/conditional 0 on replica 1"):
            assert part in str(found)
    alike = report([call("0", 1)], {"0": "/conditional 1"})
    assert all(
        isinstance(found, Elsewhere) for found in checked([0, 1], [inside, alike])
    )


@pytest.mark.parametrize("waits", [True, False])
def test_circles_over_two_processes_are_refused(waits: bool) -> None:
    """The order in which calls were built does no harm; that in which they run does."""
    everyone = (0, 1, 2)
    first = [call("0", r, group=everyone) for r in (0, 1)]
    second = [call("0,1:0", r) for r in (0, 1)]
    pairs = [(0, 1)] if waits else []
    reports = [
        report([first[0], second[0]], waits=pairs),
        report([second[1], first[1]], waits=pairs),
        report([call("0", 2, group=everyone)]),
    ]
    for found in checked([0, 1, 1], reports):
        assert isinstance(found, errors.DeadlockError if waits else Elsewhere)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("waits", [True, False])
def test_circles_inside_functions_are_refused(waits: bool, depth: int) -> None:
    reports = []
    for r, process_order in enumerate([(0, 1), (1, 0)]):
        calls = [call(f"{'0,1:' * n}0", r) for n in (0, 1)]
        calls = [calls[n] for n in process_order]
        replica = report(calls, {c.key: "/function 0" * depth for c in calls})
        keys = [c.key for c in calls]
        pairs = [(0, 1)] if waits else []
        replica.levels[:] = [
            levels.LevelReport(
                [("function", keys, f"replica {r}", [n + 1])], lambda: []
            )
            for n in range(depth)
        ] + [levels.LevelReport(replica.levels[0].stops, lambda pairs=pairs: pairs)]
        reports.append(replica)
    for found in checked([0, 1], reports):
        assert isinstance(found, errors.DeadlockError if waits else Elsewhere)
