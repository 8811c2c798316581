# SPDX-License-Identifier: Apache-2.0
"""No program exceeds the staleness bound, and none waits forever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicator
from replicator import errors, strategy
from replicator.hosts.asynchronous import clock
from replicator.hosts.asynchronous.board import ENDED, LOST, PRESENT, STATES, STEPS
from replicator.hosts.asynchronous.clock import Clock
from replicator.hosts.asynchronous.events import Events
from replicator.strategy import choosing
from tests.hosts.asynchronous.tables import Table


def _clocks(table: Table, staleness: int | None) -> list[Clock]:
    count = table.numbers.shape[1]
    names = tuple(f"host-{n}" for n in range(count))
    return [
        Clock(table.seen_by(n), names, Events(n, {}), staleness) for n in range(count)
    ]


@settings(deadline=None, max_examples=200)
@given(
    count=st.integers(1, 5),
    staleness=st.integers(1, 4),
    steps=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    turns=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=60),
)
def test_the_bound_is_never_passed_and_somebody_may_always_go_on(
    count: int, staleness: int, steps: list[int], turns: list[tuple[int, int]]
) -> None:
    table = Table(count)
    clocks = _clocks(table, staleness)
    per_call = [min(number, staleness) for number in steps[:count]]
    for n, what in turns:
        n %= count
        states = table.numbers[STATES]
        if what == 0 and (states == PRESENT).sum() > 1:
            states[n] = ENDED  # or lost: both block nobody
        present = np.flatnonzero(states == PRESENT)
        free = [
            m for m in present if not clocks[m]._is_early(table.numbers, per_call[m])
        ]
        assert free, "the slowest is never early"
        if n in free:
            clocks[n].counted(lambda: None, per_call[n])()
        done = table.numbers[STEPS, present]
        assert done.max() - done.min() <= staleness


def test_the_bound_is_reached() -> None:
    table = Table(2)
    fast, slow = _clocks(table, 3)
    for _ in range(3):
        fast.begin(1)
        fast.done(1)
    assert fast._is_early(table.numbers, 1)
    slow.begin(1)
    slow.done(1)
    assert not fast._is_early(table.numbers, 1)


def test_steps_of_one_call_may_not_exceed_the_bound() -> None:
    table = Table(2)
    fast, _ = _clocks(table, 4)
    with pytest.raises(
        errors.ArgumentError,
        match=r"steps_per_call=5 is more than the staleness of 4(.|\n)*test_clock.py"
        r"(.|\n)*Fix: pass steps_per_call=4 or less; or use PS\(staleness=5\)",
    ):
        fast.counted(lambda: None, 5)
    fast.counted(lambda: None, 3)()
    assert not fast._is_early(table.numbers, 1)
    assert fast._is_early(table.numbers, 3), "3 more would be 6 ahead"
    _clocks(table, None)[0].counted(lambda: None, 5)()


def test_without_a_bound_nobody_waits() -> None:
    table = Table(2)
    fast, _ = _clocks(table, None)
    for _ in range(100):
        fast.begin(1)
        fast.done(1)
    fast.refuse_graph()
    with pytest.raises(errors.ContextError, match="staleness of 2(.|\n)*sync=False"):
        _clocks(table, 2)[0].refuse_graph()


def test_who_was_taken_for_lost_does_not_go_on() -> None:
    table = Table(2)
    clock = _clocks(table, 2)[1]
    table.numbers[STATES, 1] = LOST
    with pytest.raises(
        errors.HostLostError, match="host-1, was silent(.|\n)*restart it"
    ):
        clock.begin(1)


@pytest.mark.parametrize(
    ("given", "staleness"),
    [
        (None, None),
        (strategy.PS(sync=False), None),
        (strategy.PS(staleness=3), 3),
        (strategy.PSLoadBalancing(staleness=1), 1),
        ({"a": strategy.PS(staleness=3), ".*": strategy.PS(staleness=2)}, 2),
        ({"a": strategy.PS(staleness=3), ".*": strategy.PS(sync=False)}, 3),
    ],
)
def test_programs_are_as_near_as_the_nearest_rule(
    given: Any, staleness: int | None
) -> None:
    builder = None if given is None else choosing.as_builder(given)
    assert clock.staleness(builder) == staleness


@pytest.mark.parametrize(
    "given",
    [
        strategy.PS(),
        strategy.AllReduce(),
        strategy.PartitionedPS(sync=False),
        {".*": strategy.Mirrored()},
    ],
)
def test_what_is_for_one_process_is_refused(given: Any) -> None:
    with pytest.raises(replicator.StrategyError, match=r"own speed(.|\n)*sync=False"):
        clock.staleness(choosing.as_builder(given))
