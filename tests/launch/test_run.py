# SPDX-License-Identifier: Apache-2.0
"""What a program gets and what is shown of it; the server is a stub."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import sys

from tests.launch.stub import BEGIN, Place, ready


def test_the_program_gets_its_arguments_and_the_cluster(place: Place) -> None:
    place.program(
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.environ['REPLICATOR_CLUSTER']]))\n"
    )
    flags = ("--nnodes", "2", "--nproc-per-node=3", "--heartbeat=4.5")
    result = place.launch(*flags, "train.py", "--nnodes=7", "--", "-m")
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("[["))
    arguments, text = json.loads(line)
    assert arguments == ["--nnodes=7", "--", "-m"]
    cluster = json.loads(text)
    first, second = cluster.pop("hosts")
    assert not os.path.exists(cluster.pop("file"))  # deleted with the launcher
    assert cluster == {
        "version": 1,
        "source": "--nnodes=2 --nproc-per-node=3",
        "heartbeat": 4.5,
        "client": "127.0.0.1:0",
    }
    ports = {host.pop("address").partition("127.0.0.1:")[2] for host in (first, second)}
    assert len(ports) == 2
    assert "0" not in ports
    assert first == {"name": "localhost-0", "cpus": 3, "gpus": 0}
    assert second == {"name": "localhost-1", "cpus": 3, "gpus": 0}


def test_a_module_reads_standard_input_and_gets_variables(place: Place) -> None:
    place.program("import sys\nprint(sys.argv[1], repr(sys.stdin.read()))\n", "m.py")
    result = place.launch("--env=STUB=of the flag", "--insecure", "-m", "m", "--x")
    assert result.returncode == 0, result.stderr
    assert "--x ''" in result.stdout.splitlines()
    assert "[localhost-0] of the flag " in result.stderr


def test_lines_of_hosts_have_their_names_and_files(place: Place) -> None:
    place.program("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    result = place.launch("--nnodes=2", "--output-dir=logs/a", "train.py", STUB="said")
    assert result.returncode == 0
    assert {*result.stdout.splitlines()} == {
        "out",
        "[localhost-0] not yet up",
        "[localhost-1] not yet up",
    }
    lines = result.stderr.splitlines()
    assert {"err", "[localhost-0] said None", "[localhost-1] said None"} == {*lines}
    logs = place.folder / "logs" / "a"
    assert {path.name: {*path.read_text().split("\n")} for path in logs.iterdir()} == {
        "localhost-0.log": {"not yet up", "said None", ""},
        "localhost-1.log": {"not yet up", "said None", ""},
        "program.log": {"out", "err", ""},
    }


def test_nobody_reads_what_is_written(place: Place) -> None:
    place.program(f"{BEGIN}say('ready', os.getpid())\nsignal.pause()\n")
    with place.start("train.py") as started:
        ready(started)
        assert started.stdout and started.stderr
        started.stdout.close()
        started.stderr.close()
        os.kill(place.servers()[0], 9)
        assert started.wait(timeout=60) == 137


def test_a_terminals_interrupt_reaches_the_program_once(place: Place) -> None:
    place.program(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True))\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('ready', sys.stdin.read() == '', os.isatty(1), flush=True)\n"
        "while True:\n"
        "    time.sleep(100)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(place.folder)
        command = [sys.executable, "-m", "replicator.launch", "--grace=1", "train.py"]
        os.execve(sys.executable, command, place.env)
    output = b""
    while not re.search(rb"ready .*\n", output):
        output += os.read(terminal, 1000)
    assert b"ready True True" in output
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # how a terminal ends
        while data := os.read(terminal, 1000):
            output += data
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    assert output.count(b"interrupted") == 1
    assert b"[localhost-0]" in output
    os.close(terminal)
