# SPDX-License-Identifier: Apache-2.0
"""Starting, watching, ending and restarting; the server is a stub."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from tests.launch.stub import Place, wait_until

_READY = "import os, sys\nprint('ready', os.getpid(), flush=True)\n"
_WAIT = _READY + "import signal\nsignal.pause()\n"
_STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "for number in (signal.SIGINT, signal.SIGTERM):\n"
    "    signal.signal(number, lambda *_: print('no', flush=True))\n"
    "ignore = 'import signal,time;signal.signal(15,signal.SIG_IGN);print(flush=1)'\n"
    "command = [sys.executable, '-c', ignore + ';time.sleep(1000)']\n"
    "left = subprocess.Popen(command, start_new_session=True, stdout=-1)\n"
    "left.stdout.readline()\n"
    "print('ready', flush=True)\n"
    "while True:\n"
    "    time.sleep(100)\n"
)


def _ready(started: subprocess.Popen[str]) -> None:
    """Waits until the program runs."""
    assert started.stdout
    while "ready" not in (line := started.stdout.readline()):
        assert line, started.stderr and started.stderr.read()


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


@pytest.mark.battery(3)
@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("import sys; sys.exit(7)", 7, "the program has ended: status 7"),
        ("import os; os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_status_is_that_of_the_program(
    place: Place, program: str, status: int, said: str
) -> None:
    result = place.launch(place.program(program))
    assert result.returncode == status
    assert said in result.stderr


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(9, 137, "killed by SIGKILL"), (15, 143, "killed by SIGTERM")],
)
def test_a_server_that_dies_ends_all(
    place: Place, number: int, status: int, said: str
) -> None:
    place.program(_WAIT)
    with place.start("--nnodes=2", "--grace=5", "train.py") as started:
        _ready(started)
        os.kill(place.servers()[0], number)
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == status
    assert "localhost-" in stderr
    assert f"its server has ended: {said}" in stderr
    assert "Traceback" not in stderr
    place.expect_nothing_left()


def test_a_server_that_is_stopped_is_killed(place: Place) -> None:
    place.program(_WAIT)
    flags = ("--nnodes=2", "--heartbeat=1", "train.py")
    with place.start(*flags) as started:
        _ready(started)
        (server,) = [
            pid
            for pid, line in place.processes("replicator.serve").items()
            if os.getsid(pid) == pid
        ][:1]
        os.kill(server, signal.SIGSTOP)
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == 137
    assert "silent for 0.7 seconds (it was stopped): killed" in stderr
    place.expect_nothing_left()


def test_a_program_that_fails_because_of_a_server_is_not_to_blame(
    place: Place,
) -> None:
    place.program(_WAIT)
    with place.start("train.py") as started:
        _ready(started)
        (program,) = place.processes("train.py").keys() - {started.pid}
        for pid in (program, *place.processes("replicator.serve")):
            with contextlib.suppress(ProcessLookupError):  # ended by the launcher
                os.kill(pid, 15)
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == 143
    assert "localhost-0: its server has ended: killed by SIGTERM" in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_all(place: Place, number: int) -> None:
    place.program(_WAIT)
    with place.start("--nnodes=2", "train.py") as started:
        _ready(started)
        started.send_signal(number)
        started.communicate(timeout=60)
    assert started.returncode == 128 + (15 if number == signal.SIGHUP else number)
    place.expect_nothing_left()


def test_a_program_may_end_well_after_a_signal(place: Place) -> None:
    place.program(
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + _WAIT
    )
    with place.start("--max-restarts=3", "train.py") as started:
        _ready(started)
        started.terminate()
        started.communicate(timeout=60)
    assert started.returncode == 0


def test_a_signal_while_servers_start_ends_them(place: Place) -> None:
    place.program(_WAIT)
    with place.start("train.py", STUB="mute") as started:
        wait_until(lambda: place.processes("replicator.serve"))
        started.terminate()
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == 143
    assert stderr == ""
    place.expect_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_does_not_end_is_killed(place: Place, number: int) -> None:
    place.program(_STUBBORN)
    with place.start("--grace=0.3", "train.py") as started:
        _ready(started)
        started.send_signal(number)
        stdout, _ = started.communicate(timeout=60)
    assert "no" in stdout.splitlines()
    assert started.returncode == 137
    place.expect_nothing_left()


def test_the_second_signal_kills(place: Place) -> None:
    place.program(_STUBBORN)
    with place.start("--grace=1000", "train.py") as started:
        _ready(started)
        started.send_signal(signal.SIGINT)
        assert started.stdout
        while started.stdout.readline() != "no\n":
            pass
        started.send_signal(signal.SIGINT)
        started.communicate(timeout=60)
    assert started.returncode == 137
    place.expect_nothing_left()


def test_nothing_outlives_a_launcher_that_is_killed(place: Place) -> None:
    place.program(_STUBBORN)
    with place.start("--nnodes=2", "--grace=0.3", "train.py") as started:
        _ready(started)
        assert len(place.processes()) > 5
        started.kill()
    place.expect_nothing_left()


def test_nothing_outlives_keepers_that_are_killed(place: Place) -> None:
    place.program(_WAIT)
    with place.start("train.py") as started:
        _ready(started)
        for pid in place.processes("-I -c"):
            os.kill(pid, 9)
        started.communicate(timeout=60)
    assert started.returncode == 137


def test_what_a_program_leaves_running_is_ended(place: Place) -> None:
    place.program(
        "import subprocess\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=-3)\n"
    )
    result = place.launch("train.py")
    assert result.returncode == 0


def test_failures_start_all_anew(place: Place) -> None:
    place.program(
        "import os, sys\n"
        "count = int(os.environ['REPLICATOR_RESTARTS'])\n"
        "print('attempt', count)\n"
        "sys.exit(4 if count < 2 else 0)\n"
    )
    result = place.launch("--max-restarts=2", "train.py")
    assert result.returncode == 0
    lines = [line for line in result.stdout.splitlines() if line.startswith("attempt")]
    assert lines == ["attempt 0", "attempt 1", "attempt 2"]
    assert "restarting all, 2 of 2" in result.stderr
    result = place.launch("--max-restarts=1", "train.py")
    assert result.returncode == 4


def test_servers_that_die_start_anew(place: Place) -> None:
    place.program(
        "import os\n"
        "if os.environ['REPLICATOR_RESTARTS'] == '1':\n"
        "    raise SystemExit\n" + _WAIT
    )
    with place.start("--max-restarts=1", "train.py") as started:
        _ready(started)
        os.kill(place.servers()[0], 9)
        started.communicate(timeout=60)
    assert started.returncode == 0


@pytest.mark.parametrize(
    ("stub", "limit", "said"),
    [
        (
            "fail",
            60,
            "its server ended before it was up: replicator.serve: no good",
        ),
        ("mute", 0.5, "localhost-0: not up after 0.5 seconds; --start-timeout allows"),
    ],
)
def test_servers_that_do_not_start_are_one_line(
    place: Place, stub: str, limit: float, said: str
) -> None:
    place.program(_WAIT)
    flags = f"--start-timeout={limit}", "--max-restarts=5"
    result = place.launch(*flags, "train.py", STUB=stub)
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if "launch:" in line]
    assert said in line
    assert "Traceback" not in result.stderr


def test_nobody_reads_what_is_written(place: Place) -> None:
    place.program(_WAIT)
    with place.start("train.py") as started:
        _ready(started)
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
