# SPDX-License-Identifier: Apache-2.0
"""Every host runs the program, and the first ones servers; programs are stubs."""

from __future__ import annotations

import json
import os
import signal

import pytest

from replicator.launch import commands, flags
from replicator.launch.hosts import LaunchError
from tests.launch.stub import BEGIN, Place, lines_of

_FLAGS = ("--mode=async", "--nnodes=3")


@pytest.mark.parametrize("servers", [1, 2])
def test_every_program_is_told_of_all_and_of_the_servers(
    servers: int, place: Place
) -> None:
    place.program(
        BEGIN + "for server in hosts:\n"
        "    name, _, port = server['address'].rpartition(':')\n"
        "    with socket.create_connection((name, int(port))) as connection:\n"
        "        connection.shutdown(socket.SHUT_WR)\n"
        "        say('reached', connection.recv(100).decode().split()[0])\n"
        "say('told', json.dumps([sys.argv[1:], restarts, cluster]))\n"
    )
    more = ("--nproc-per-node=2", "--heartbeat=4.5", f"--servers={servers}")
    result = place.launch(*_FLAGS, *more, "train.py", "--servers=7")
    assert result.returncode == 0, result.stderr
    assert len(lines_of(result.stdout, "reached server")) == 3 * servers
    for task, line in enumerate(lines_of(result.stdout, "told")):
        index, restarts, cluster = json.loads(line.partition("told ")[2])
        assert (index, restarts) == (["--servers=7"], 0)
        assert cluster.pop("task") == task
        for host in cluster["hosts"]:
            assert host.pop("address").startswith("127.0.0.1:")
        assert cluster == {
            "version": 1,
            "source": "--nnodes=3 --nproc-per-node=2",
            "heartbeat": 4.5,
            "hosts": [
                {"name": f"localhost-{k}", "cpus": 1, "gpus": 0} for k in range(servers)
            ],
            "programs": [{"name": f"localhost-{k}", "cpus": 2} for k in range(3)],
        }


_LEFT = (
    "import subprocess\n"
    "ignore = 'import signal,time;signal.signal(15,signal.SIG_IGN);print(flush=1)'\n"
    "command = [sys.executable, '-c', ignore + ';time.sleep(1000)']\n"
    "left = subprocess.Popen(command, start_new_session=True, stdout=-1)\n"
    "left.stdout.readline()\n"
)


def test_a_failure_is_named_before_what_it_left_behind_has_ended(place: Place) -> None:
    """And so are those that fail meanwhile."""
    place.program(
        BEGIN + "if restarts:\n    sys.exit(0)\n"
        f"if task == 1:\n    {_LEFT.replace(chr(10), chr(10) + '    ')}sys.exit(7)\n"
        "if task == 2:\n    wait('named')\n    sys.exit(8)\n"
        "wait('both')\n"
    )
    more = ("--max-restarts=2", "--grace=1000")
    with place.start(*_FLAGS, *more, "train.py") as started:
        assert started.stderr
        for name, path in (("localhost-1", "named"), ("localhost-2", "both")):
            while f"{name}: the program has ended" not in started.stderr.readline():
                pass
            (place.folder / path).touch()
        for pid in place.processes("time.sleep(1000)"):
            os.kill(pid, signal.SIGKILL)
        _, stderr = started.communicate(timeout=300)
    assert started.returncode == 0, stderr
    place.expect_nothing_left()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--mode=async", "--tunnel"], "--tunnel is not for --mode=async"),
        (["--mode=async", "--nnodes=2", "--servers=3"], "--servers=3, but there are 2"),
        (["--mode=between", "--servers=2"], "--servers is for --mode=async"),
        (["--mode=async", "--min-nodes=1"], "those of --mode=async continue with any"),
    ],
)
def test_flags_that_do_not_fit_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        flags.parse([*given, "-m", "train"], {}, set())


def test_the_first_hosts_hold_variables() -> None:
    job = flags.parse(
        ["--mode=async", "--nnodes=3", "--servers=2", "-m", "train"], {}, set()
    )
    hosts = commands.with_servers(job).hosts
    assert [(host.name, host.slots) for host in hosts] == [
        ("localhost-0", 1),
        ("localhost-1", 1),
    ]
