# SPDX-License-Identifier: Apache-2.0
"""The log of a program: a line of JSON for each event, as soon as it happens."""

from __future__ import annotations

import json
import pathlib
import time

from replicator.hosts.asynchronous.clock import Clock
from replicator.hosts.asynchronous.events import FOLDER, Events
from tests.hosts.asynchronous.tables import Table


def test_the_log_says_who_was_where(tmp_path: pathlib.Path) -> None:
    table = Table(2)
    events = Events(0, {FOLDER: str(tmp_path / "new")})
    clock = Clock(table.seen_by(0), ("a", "b"), events, 1)
    clock.begin(1)
    clock.done(1)
    lines = (tmp_path / "new" / "worker-0.jsonl").read_text().splitlines()
    begins, done = map(json.loads, lines)
    assert (begins["event"], begins["steps"]) == ("begins", [0, 0])
    assert (done["event"], done["total"], done["worker"]) == ("done", 1, 0)


def test_a_line_is_there_when_it_is_noted(tmp_path: pathlib.Path) -> None:
    """So the log of a killed program ends with its last action."""
    events = Events(3, {FOLDER: str(tmp_path)})
    before = time.time()
    for k in range(3):
        events.note("done", total=k, names=["a", "b"])
        lines = (tmp_path / "worker-3.jsonl").read_text().splitlines()
        assert len(lines) == k + 1
        line = json.loads(lines[-1])
        assert before <= line.pop("time") <= time.time()
        assert line == {
            "worker": 3,
            "event": "done",
            "total": k,
            "names": ["a", "b"],
        }


def test_a_program_that_is_started_again_goes_on_with_its_log(
    tmp_path: pathlib.Path,
) -> None:
    for event in ("first", "second"):
        Events(0, {FOLDER: str(tmp_path)}).note(event)
    Events(1, {FOLDER: str(tmp_path)}).note("beside")
    lines = (tmp_path / "worker-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["first", "second"]
    assert len((tmp_path / "worker-1.jsonl").read_text().splitlines()) == 1


def test_nothing_is_written_unless_the_environment_says_where(
    tmp_path: pathlib.Path,
) -> None:
    Events(0, {}).note("done", total=1)
    Events(0, {FOLDER: ""}).note("done", total=1)
    assert list(tmp_path.iterdir()) == []
