# SPDX-License-Identifier: Apache-2.0
"""Servers that die while the program runs: restarted, or left out."""

from __future__ import annotations

import os

from tests.launch.stub import BEGIN, Place, line_of

_COPES = (
    BEGIN
    + """
import pathlib
path = pathlib.Path(cluster["file"])
assert json.loads(path.read_text()) == cluster
path.with_name("resilient").touch()

def answers(host):
    name, _, port = host["address"].rpartition(":")
    try:
        with socket.create_connection((name, int(port)), timeout=5) as peer:
            peer.shutdown(socket.SHUT_WR)
            return b"server" in peer.recv(100)
    except OSError:
        return False

def now():
    return json.loads(path.read_text())["hosts"]

say("ready", os.getpid())
"""
)
_AGAIN = """
for _ in range(2):
    wait(lambda: not all(map(answers, hosts)))
    wait(lambda: all(map(answers, hosts)))
    say("again", now() == hosts)
"""
_FEWER = """
wait(lambda: len(now()) == 1)
say("fewer", now()[0]["name"], answers(now()[0]))
"""


def _kill_server(place: Place) -> None:
    """Kills a server; the keeper has to end its children."""
    os.kill(place.servers()[0], 9)


def test_a_server_starts_again_where_it_was(place: Place) -> None:
    place.program(_COPES + _AGAIN)
    with place.start("--nnodes=2", "--max-restarts=2", "train.py") as started:
        line_of(started, "ready")
        for _ in range(2):
            _kill_server(place)
            assert line_of(started, "again") == "again True\n"
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == 0, stderr
    message = "its server has ended: killed by SIGKILL; restarting it, 2 of 2"
    assert message in stderr
    assert stderr.count("its server is up again") == 2
    assert "restarting all" not in stderr  # the program kept running
    place.expect_nothing_left()


def test_restarts_come_to_an_end(place: Place) -> None:
    place.program(_COPES + "wait(lambda: False)")
    with place.start("--nnodes=2", "--max-restarts=0", "train.py") as started:
        line_of(started, "ready")
        _kill_server(place)
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == 137
    assert "its server has ended: killed by SIGKILL\n" in stderr
    place.expect_nothing_left()


def test_fewer_hosts_go_on(place: Place) -> None:
    place.program(_COPES + _FEWER)
    with place.start("--nnodes=2", "--min-nodes=1", "train.py") as started:
        line_of(started, "ready")
        _kill_server(place)
        assert line_of(started, "fewer").endswith("True\n")
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == 0, stderr
    assert "continuing with 1 of 2 hosts, without localhost-" in stderr
    warning = "--min-nodes=1: fewer hosts can continue from a checkpoint with repl.inp"
    assert stderr.count(warning) == 1
    assert stderr.index(warning) < stderr.index("has ended")  # at the start
    place.expect_nothing_left()


def test_fewer_than_that_do_not(place: Place) -> None:
    place.program(_COPES + _FEWER + "wait(lambda: False)")
    with place.start("--nnodes=2", "--min-nodes=1", "train.py") as started:
        line_of(started, "ready")
        _kill_server(place)
        line_of(started, "fewer")
        _kill_server(place)
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == 137, stderr
    place.expect_nothing_left()


def test_a_server_that_does_not_start_again(place: Place) -> None:
    place.program(_COPES + "wait(lambda: False)")
    flags = ("--nnodes=2", "--max-restarts=1", "--env=STUB", "--grace=1", "train.py")
    broken = place.folder.parent / "path" / "replicator" / "serve" / "__main__.py"
    with place.start(*flags, STUB="said") as started:
        line_of(started, "ready")
        broken.write_text("raise SystemExit('replicator.serve: no good')")
        _kill_server(place)
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == 1
    assert "its server ended before it was up: replicator.serve: no good" in stderr
    assert "Traceback" not in stderr
    place.expect_nothing_left()
