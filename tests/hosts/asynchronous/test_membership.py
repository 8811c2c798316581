# SPDX-License-Identifier: Apache-2.0
"""A program that is silent for a heartbeat is lost, and no other; in one process."""

from __future__ import annotations

import itertools
import json
import pathlib
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicator.hosts.asynchronous import board as boards
from replicator.hosts.asynchronous import membership
from replicator.hosts.asynchronous.board import BEATS, ENDED, LOST, PRESENT, STATES
from replicator.hosts.asynchronous.events import FOLDER
from replicator.hosts.asynchronous.membership import Member
from tests.hosts.asynchronous.tables import Seen, Table

_LONG = 60.0  # seconds; nothing here takes as long


def _member(table: Table, own: int = 0, heartbeat: float = 2.0) -> Member:
    """Returns a program's membership, where no host is connected."""
    names = tuple(f"host-{n}" for n in range(table.numbers.shape[1]))
    board: Any = table.seen_by(own)
    return Member(board, names, heartbeat, token=None)


@settings(deadline=None, max_examples=50)
@given(
    count=st.integers(2, 4),
    turns=st.lists(
        st.tuples(st.integers(1, 15), st.sets(st.integers(1, 3))), max_size=20
    ),
)
def test_who_is_silent_for_a_heartbeat_is_lost(
    count: int, turns: list[tuple[int, set[int]]]
) -> None:
    """Compared with a record of when each was heard last.

    Time passes in tenths of a second, so that no sum of them is rounded to 2.0.
    """
    table, now, heard = Table(count), 0, dict.fromkeys(range(1, count), 0)
    member = _member(table)
    lost: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        clock = types.SimpleNamespace(monotonic=lambda: now / 10)
        patch.setattr(membership, "time", clock)
        member._look()
        for passed, beating in turns:
            now += passed
            for n in beating.intersection(heard).difference(lost):
                table.numbers[BEATS, n] += 1
                heard[n] = now
            member._look()
            lost |= {n for n, at in heard.items() if now - at > 20}
            states = table.numbers[STATES].tolist()
            assert states[0] == PRESENT, "nobody takes itself for lost"
            assert [n for n, at in enumerate(states) if at == LOST] == sorted(lost)


def test_who_has_ended_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(step=10)
    clock = types.SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr(membership, "time", clock)
    table = Table(3)
    table.numbers[STATES, 1] = ENDED
    table.numbers[STATES, 2] = boards.ABSENT
    member = _member(table)
    for _ in range(3):
        member._look()
    assert table.numbers[STATES].tolist() == [PRESENT, ENDED, boards.ABSENT]


def test_a_program_tells_that_it_lives_until_it_ends(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    table = Table(1)
    member = _member(table, heartbeat=0.01)
    member.start()
    assert boards.wait(lambda: table.numbers[BEATS, 0] > 2, _LONG)
    assert member.daemon, "a program ends without waiting for it"
    member.end()
    assert not member.is_alive()
    assert table.numbers[STATES, 0] == ENDED
    lines = (tmp_path / "worker-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["ended"]


def test_one_says_that_another_is_lost(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    table = Table(2)
    member = _member(table, own=1, heartbeat=0.01)
    member.start()
    assert boards.wait(lambda: table.numbers[STATES, 0] == LOST, _LONG)
    member.end()
    lines = (tmp_path / "worker-1.jsonl").read_text().splitlines()
    lost, ended = map(json.loads, lines)
    assert (lost["event"], lost["program"], ended["event"]) == ("lost", 0, "ended")


def test_a_membership_ends_with_its_connection() -> None:
    table = Table(1)
    member = _member(table, heartbeat=0.01)
    member.token = object()  # not this process's token
    member.start()
    member.join(_LONG)
    assert not member.is_alive()
    member.end()
    assert not table.numbers[BEATS].any()
    assert table.numbers[STATES, 0] == PRESENT, "it tells nobody any more"


def test_a_server_that_is_gone_does_no_harm() -> None:
    class Gone(Seen):
        def write(self, row: int, value: int, column: int | None = None) -> None:
            raise ConnectionError("gone")

    board: Any = Gone(np.zeros([3, 1], np.int64), 0)
    member = Member(board, ("host-0",), 0.01, token=None)
    member.start()
    member.join(_LONG)
    assert not member.is_alive()
    member.end()


def test_clocks_are_those_of_the_board() -> None:
    member = _member(Table(3), own=2)
    clock = member.clock(4)
    assert clock.place == (2, 3) and clock.staleness == 4


def test_a_process_alone_is_no_member() -> None:
    assert membership.member() is None
