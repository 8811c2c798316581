# SPDX-License-Identifier: Apache-2.0
"""Programs that train the same variables, each at its own speed."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import time

import pytest

from tests.cluster import servers
from tests.hosts.asynchronous import processes


def _line(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout
    line = process.stdout.readline()
    assert line.strip() == word, (line, process.stderr and process.stderr.read())


def _go_on(started: list[subprocess.Popen[str]]) -> None:
    """Waits until all have arrived, and lets them continue."""
    for process in started:
        _line(process, "here")
    _let_go(started)


def _let_go(started: list[subprocess.Popen[str]]) -> None:
    for process in started:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "programs"), [(1, 2), (2, 3)])
def test_what_each_program_adds_is_there_once(count: int, programs: int) -> None:
    steps, cpus = 7, (2, 1, 2)[:programs]
    with servers.serving(count) as server_facts:
        up = processes.addresses(server_facts)
        started = processes.start(up, "counts", cpus, str(steps))
        _go_on(started)
        results = processes.ended(started)
    calls = [steps * (n + 1) for n in range(programs)]
    means = [1.5, 1.0, 1.5][:programs]  # over the replicas of each program
    total = -0.25 * sum(n * mean for n, mean in zip(calls, means, strict=True))
    names = [f"host-{n}" for n in range(programs)]
    for n, result in enumerate(results):
        assert result["v"] == pytest.approx([total] * 2)
        assert result["iterations"] == sum(calls)
        assert result["n"] == 2 * sum(calls)
        assert result["mean"] == means[n]
        assert result["devices"] == cpus[n]
        assert result["host"] == [n, programs, names]
        tasks = [device.split("/")[3] for device in result["on"]]
        assert tasks == ["task:0", f"task:{count - 1}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "programs"), [(1, 3), pytest.param(3, 2, marks=pytest.mark.gate)]
)
def test_the_bound_is_reached_and_never_passed(
    staleness: int, programs: int, tmp_path: pathlib.Path
) -> None:
    cpus = (1,) * programs
    processes.run("ahead", cpus, str(staleness), "12", "0.1", log=tmp_path)
    begun = [e for e in processes.log_of(tmp_path) if e["event"] == "begins"]
    assert len(begun) == 12 * programs
    ahead = [e["steps"][e["worker"]] + 1 - min(e["steps"]) for e in begun]
    assert max(ahead) == staleness


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_who_is_lost_is_named_and_holds_up_nobody(
    how: str, tmp_path: pathlib.Path
) -> None:
    with servers.serving(1) as server_facts:
        up = processes.addresses(server_facts)
        started = processes.start(up, "lives", (1, 1, 1), "2", log=tmp_path)
        for process in started:
            _line(process, "running")
        victim = started.pop()
        number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
        victim.send_signal(number)
        at = time.time()
        try:
            results = processes.ended(started)
            if how == "stopped":
                victim.send_signal(signal.SIGCONT)
                (late,) = processes.ended([victim])
                assert late["hosts"] == ["host-2"]
                assert "have continued without it" in late["error"]
        finally:
            victim.kill()
    assert all(result["v"] <= -400.0 for result in results)
    lost = [e for e in processes.log_of(tmp_path) if e["event"] == "lost"]
    assert lost and all(e["program"] == 2 for e in lost)
    assert lost[0]["time"] - at < 2 * processes.HEARTBEAT


@pytest.mark.slow
def test_a_lost_server_is_named_by_all() -> None:
    with servers.serving(1) as server_facts:
        up = processes.addresses(server_facts)
        started = processes.start(up, "lives", (1, 1), "2")
        for process in started:
            _line(process, "running")
        subprocess.run(["kill", "-9", str(server_facts[0]["pid"])], check=True)
        results = processes.ended(started)
    assert all(result["hosts"] == ["server-0"] for result in results)


@pytest.mark.slow
def test_each_element_goes_to_one_program() -> None:
    results = processes.run("inputs", (2, 2, 1)[:2])
    dealt, own, split = ([*a, *b] for a, b in zip(*results, strict=True))
    assert sorted(dealt) == list(range(12))
    assert sorted(own) == list(range(12))
    assert sorted(split) == list(range(12))


@pytest.mark.slow
def test_a_checkpoint_is_written_by_the_first_and_gone_on_from(
    tmp_path: pathlib.Path,
) -> None:
    results = []
    for until in ("6", "9"):
        with servers.serving(1) as server_facts:
            up = processes.addresses(server_facts)
            started = processes.start(up, "resumes", (1, 1), str(tmp_path), until)
            _go_on(started)
            _go_on(started)
            results.append(processes.ended(started))
    before, after = results
    assert [one["begun"] for one in (*before, *after)] == [0, 0, 6, 6]
    assert [one["iterations"] for one in (*before, *after)] == [12, 12, 18, 18]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@pytest.mark.slow
def test_a_program_that_is_started_again_goes_on_with_the_others(
    tmp_path: pathlib.Path,
) -> None:
    with servers.serving(1) as server_facts:
        up = processes.addresses(server_facts)
        arguments = (up, "resumes", (1, 1), str(tmp_path), "6")
        first, second = processes.start(*arguments)
        for process in (first, second):
            _line(process, "here")
        second.kill()
        (again,) = processes.start(*arguments, only=1)
        _line(again, "here")
        _let_go([first, again])
        _go_on([first, again])
        results = processes.ended([first, again])
    assert [result["iterations"] for result in results] == [12, 12]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "own", "other"),
    [
        ("shape", "", "MismatchError: the programs create different(.|\n)*float64"),
        ("none", "", "MismatchError: (.|\n)*host-0 creates v:0: float32"),
        ("function", "ContextError: .*staleness of 2", "ContextError"),
    ],
)
def test_what_cannot_be_is_refused(what: str, own: str, other: str) -> None:
    first, second = processes.run("others", (2, 2), what)
    assert re.search(own, first) and bool(own) == bool(first), first
    assert re.search(other, second), second


@pytest.mark.slow
def test_the_example_of_the_docstring() -> None:
    for count, *wrong in processes.run("example", (1, 1)):
        assert not wrong, "".join(wrong)
        assert count >= 5
