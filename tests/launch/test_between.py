# SPDX-License-Identifier: Apache-2.0
"""Every host runs the program, and no server; the programs are stubs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import pytest

from replicator.launch import questions
from replicator.launch.between import Programs
from replicator.launch.commands import Command
from replicator.launch.flags import Job
from replicator.launch.hosts import JobHost
from tests.launch import sshd
from tests.launch.stub import BEGIN, Place, lines_of, only, ready, wait_until

_FLAGS = ("--mode=between", "--nnodes=2")
_BEGIN = f"{BEGIN}own, other = hosts[task]['address'], hosts[-1 - task]['address']\n"
_WAIT = _BEGIN + "say('ready', os.getpid())\nsignal.pause()\n"


def test_every_program_is_told_of_all(place: Place) -> None:
    place.program(
        _BEGIN + "say('told', json.dumps([sys.argv[1:], os.getcwd(), restarts,"
        " sys.stdin.read(), os.environ['STUB'], cluster]))\n"
    )
    flags = (*_FLAGS, "--nproc-per-node=3", "--heartbeat=4.5", "--env=STUB=of the flag")
    result = place.launch(*flags, "train.py", "--nnodes=7", "-m")
    assert result.returncode == 0, result.stderr
    lines = lines_of(result.stdout, "told")
    reports = [json.loads(line.partition("told ")[2]) for line in lines]
    assert [line[:13] for line in lines] == ["[localhost-0]", "[localhost-1]"]
    for task, (*facts, cluster) in enumerate(reports):
        own_flags = ["--nnodes=7", "-m"]
        assert facts == [own_flags, str(place.folder), 0, "", "of the flag"]
        assert cluster.pop("task") == task
    assert reports[0][-1] == (cluster := reports[1][-1])
    addresses = [host.pop("address") for host in cluster["hosts"]]
    assert len({*addresses}) == 2
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert cluster == {
        "version": 1,
        "source": "--nnodes=2 --nproc-per-node=3",
        "heartbeat": 4.5,
        "hosts": [
            {"name": f"localhost-{task}", "cpus": 3, "gpus": None} for task in (0, 1)
        ],
    }


# Each listens where it was told to, and reaches the other.
MEET = (
    _BEGIN
    + """
name, _, port = own.rpartition(":")
listening = socket.create_server((name, int(port)))

def reach():
    name, _, port = other.rpartition(":")
    try:
        with socket.create_connection((name, int(port)), timeout=5) as connection:
            connection.sendall(str(task).encode())
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(100)
    except OSError:
        return b""

if os.fork() == 0:
    wait(reach)
    os._exit(0)
heard = b""
while not heard:  # a tunnel connects before anybody listens
    connection, _ = listening.accept()
    heard = connection.recv(100)
    connection.sendall(b"yes")
    connection.close()
say("heard", heard.decode())
os.wait()
"""
)


def test_the_ports_are_free_and_lead_to_the_programs(place: Place) -> None:
    place.program(MEET)
    result = place.launch(*_FLAGS, "train.py")
    assert result.returncode == 0, result.stderr
    assert lines_of(result.stdout, "heard") == [
        "[localhost-0] heard 1",
        "[localhost-1] heard 0",
    ]


def test_lines_have_the_hosts_names_and_files(place: Place) -> None:
    place.program("import sys\nprint('out')\nprint('err', file=sys.stderr)\n", "m.py")
    result = place.launch(*_FLAGS, "--output-dir=logs", "-m", "m")
    assert result.returncode == 0
    both = [f"[localhost-{k}]" for k in (0, 1)]
    assert sorted(result.stdout.splitlines()) == [f"{name} out" for name in both]
    assert sorted(result.stderr.splitlines()) == [f"{name} err" for name in both]
    logs = (place.folder / "logs").iterdir()
    assert {path.name: {*path.read_text().split("\n")} for path in logs} == {
        f"localhost-{k}.log": {"out", "err", ""} for k in (0, 1)
    }


@pytest.mark.slow
def test_failures_start_all_anew_on_other_ports(place: Place) -> None:
    place.program(
        _BEGIN + "say('attempt', restarts, own)\n"
        "if restarts == 2:\n"
        "    sys.exit()\n"
        "if task == 0:\n"
        "    sys.exit(4)\n"
        "signal.pause()\n"
    )
    result = place.launch(*_FLAGS, "--max-restarts=2", "train.py")
    assert result.returncode == 0, result.stderr
    lines = [
        line for line in lines_of(result.stdout, "attempt") if "localhost-0" in line
    ]
    assert [line.split()[2] for line in lines] == ["0", "1", "2"]
    assert len({line.split()[3] for line in lines}) == 3
    assert "restarting all, 2 of 2" in result.stderr
    result = place.launch(*_FLAGS, "--max-restarts=1", "train.py")
    assert result.returncode == 4


# The error of replicator.connect if a port is taken, here by its text alone.
_TAKEN = (
    _BEGIN
    + """
if task == 1:
    wait(lambda: os.path.exists("well"))
    sys.exit()
attempt = len([name for name in os.listdir() if name.startswith("attempt")])
open(f"attempt{attempt}", "w").write(f"{restarts} {own}")
if attempt == FREE:
    open("well", "w")
    sys.exit()
address = ADDRESS
sys.exit(f"ClusterError: host 0 ({address}) could not join the others: "
         "UnknownError: Could not start gRPC server.")
"""
)


def _attempts(place: Place) -> list[list[str]]:
    paths = sorted(place.folder.glob("attempt*"))
    return [path.read_text().split() for path in paths]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_ports_are_tried_where_one_is_taken(place: Place, count: int) -> None:
    place.program(_TAKEN.replace("FREE", "2").replace("ADDRESS", "own"))
    result = place.launch("--mode=between", f"--nnodes={count}", "train.py")
    assert result.returncode == 0, result.stderr
    attempts = _attempts(place)
    assert [restarts for restarts, _ in attempts] == ["0", "0", "0"]
    assert len({address for _, address in attempts}) == 3
    assert result.stderr.count("a port was taken: restarting all on other ports") == 2


@pytest.mark.slow
def test_no_more_than_three_times(place: Place) -> None:
    place.program(_TAKEN.replace("FREE", "9").replace("ADDRESS", "own"))
    result = place.launch(*_FLAGS, "train.py")
    assert result.returncode == 1
    assert [restarts for restarts, _ in _attempts(place)] == ["0", "0", "0"]


def test_what_others_say_of_their_ports_is_of_no_matter(place: Place) -> None:
    place.program(_TAKEN.replace("FREE", "9").replace("ADDRESS", "other"))
    result = place.launch(*_FLAGS, "train.py")
    assert result.returncode == 1
    assert len(_attempts(place)) == 1


# --- Over SSH -------------------------------------------------------------------------


def _here_and_there(remote: sshd.Server) -> tuple[str, ...]:
    hosts, *flags = remote.flags
    return ("--mode=between", f"{hosts},localhost", *flags)


def test_programs_here_and_there(place: Place, remote: sshd.Server) -> None:
    place.program(MEET)
    flags = _here_and_there(remote)
    result = place.launch(*flags, "--verbose", "train.py")
    assert result.returncode == 0, result.stderr
    assert lines_of(result.stdout, "heard") == [
        "[127.0.0.2] heard 1",
        "[localhost] heard 0",
    ]
    message = "127.0.0.2: the program has started; it listens at 127.0.0.2:"
    assert message in result.stderr


def test_a_host_that_is_lost_is_why_others_fail(
    place: Place, remote: sshd.Server
) -> None:
    place.program(_WAIT)
    with place.start(*_here_and_there(remote), "train.py") as started:
        here = ready(started, 2)["localhost"]
        keeper = pathlib.Path(f"/proc/{here}/stat").read_text().split()[3]
        os.kill(here, signal.SIGABRT)  # slightly earlier, as TensorFlow aborts it
        wait_until(lambda: not os.path.exists(f"/proc/{keeper}"))
        for pid in remote.connections():
            os.kill(pid, 9)
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == 255
    message = "127.0.0.2: the program has ended: the connection to its host is lost"
    assert message in only(stderr)
    place.expect_nothing_left()


def test_a_frozen_host_is_named_and_not_one_that_fails_by_it(
    place: Place, remote: sshd.Server
) -> None:
    place.program(
        _BEGIN + "def fail(*_):\n"
        "    sys.exit('replicator.errors.HostLostError: 1 of 2 hosts is lost.')\n"
        "signal.signal(signal.SIGUSR1, fail)\n"
        "say('ready', os.getpid())\n"
        "signal.pause()\n"
    )
    flags = (*_here_and_there(remote), "--heartbeat=3")
    with place.start(*flags, "train.py") as started:
        here = ready(started, 2)["localhost"]
        connections = remote.connections()
        for pid in connections:
            os.kill(pid, signal.SIGSTOP)
        os.kill(here, signal.SIGUSR1)  # which finds it before the launcher does
        _, stderr = started.communicate(timeout=60)
        for pid in connections:
            os.kill(pid, signal.SIGKILL)
    assert started.returncode == 255
    message = "127.0.0.2: the program has ended: the connection to its host is lost"
    assert message in only(stderr)
    place.expect_nothing_left()


def test_a_program_that_is_not_there_is_one_line(
    place: Place, remote: sshd.Server
) -> None:
    (hosts, *flags), folder = remote.flags, place.folder
    result = place.launch("--mode=between", hosts, *flags, "train.py")
    assert result.returncode == 2
    message = f"127.0.0.2: there is no train.py in {folder}; --sync copies the working"
    assert message in only(result.stderr)


# --- The addresses that all programs get; the hosts are fakes -------------------------


class _Process:
    """A process that keeps running."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = asyncio.get_running_loop().create_future()


class _Machines:
    """Hosts with one address."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.remotes = [None for _ in job.hosts]
        self.addresses = ["10.0.0.1" for _ in job.hosts]
        self.sources = ()
        self.tunnel = None
        self.told: list[Any] = []

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        yield

    async def reach(self, retry: bool) -> None: ...

    def python(self, index: int) -> str:
        return "python"

    async def start(self, index: int, command: Command) -> _Process:
        self.told.append(json.loads(command.env["REPLICATOR_CLUSTER"]))
        return _Process(self._job.hosts[index].name)

    def follow(self, process: _Process, on_error: Any) -> None: ...

    async def run_all(self, waited: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        return list(await asyncio.gather(*waited))

    def note(self, text: str) -> None: ...


def test_no_port_is_given_to_two(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = iter([5, 5, 6, 7])
    monkeypatch.setattr(questions, "free_port", lambda: next(actual))
    job = Job((JobHost("a"), JobHost("b")), "", ("train.py",))

    async def start() -> list[Any]:
        machines: Any = _Machines(job)
        await Programs(job, machines, 0).start(retry=False)
        return machines.told

    announced = asyncio.run(start())
    assert [one["task"] for one in announced] == [0, 1]
    for one in announced:
        assert [host["address"] for host in one["hosts"]] == [
            "10.0.0.1:6",
            "10.0.0.1:7",
        ]
