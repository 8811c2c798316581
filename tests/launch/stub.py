# SPDX-License-Identifier: Apache-2.0
"""Runs the launcher with a stub of replicator's server, without TensorFlow.

The environment variable STUB selects its behavior: "fail", "mute", or unset for normal.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

from replicator import launch

MARK = "REPLICATOR_TEST_MARK"  # set on all processes of a test, to a unique value
_LIMIT = 300.0  # seconds; only real servers take more than a few
_SERVER = """
import json, os, socket, sys, time
flags = dict(a.lstrip("-").partition("=")[::2] for a in sys.argv[1:])
if os.environ.get("STUB") == "fail":
    sys.exit("replicator.serve: no good")
if os.environ.get("STUB") == "mute":
    time.sleep(1000)
listening = socket.create_server((flags["host"], int(flags["port"])))
port = listening.getsockname()[1]
facts = {
    "replicator-serve": 1, "address": f"{flags['host']}:{port}", "host": "stub",
    "pid": os.getpid(), "cpus": int(flags["cpus"]), "gpus": 0, "flags": flags,
    "answers": flags.get("peers", "anybody"),
}
print("not yet up", flush=True)
print(json.dumps(facts), flush=True)
print(os.environ.get("STUB"), flags.get("insecure"), file=sys.stderr)
if os.fork() == 0:  # serves, and ends with its parent only if somebody ends it
    while True:
        connection, _ = listening.accept()
        peer = connection.recv(100).decode()
        if peer:  # the address of another, who is asked in turn
            host, _, port = peer.rpartition(":")
            with socket.create_connection((host, int(port))) as other:
                other.shutdown(socket.SHUT_WR)
                connection.sendall(b"by way of " + flags["port"].encode() + b": ")
                connection.sendall(other.recv(100))
        else:
            connection.sendall(b"server " + flags["port"].encode())
        connection.close()
sys.stdin.read()
"""


# The start of programs. `say` writes a line atomically, whoever else writes; `wait`
# waits for a file or a condition.
BEGIN = """
import json, os, signal, socket, subprocess, sys, time
cluster = json.loads(os.environ["REPLICATOR_CLUSTER"])
task, hosts = cluster.get("task", 0), cluster["hosts"]
restarts = int(os.environ["REPLICATOR_RESTARTS"])
signal.signal(2, signal.SIG_DFL)  # ends without a traceback

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

def wait(what):
    while not (what() if callable(what) else os.path.exists(what)):
        time.sleep(0.02)
"""


class Place:
    """A folder with a stub of the package, and an environment that imports it.

    Attributes:
        folder: The folder of programs, and the working directory.
        env: The environment of launchers.
        mark: The value of MARK.
        prefix: The command prefix of launchers on another network.
    """

    def __init__(self, root: pathlib.Path) -> None:
        package = root / "path" / "replicator"
        (package / "serve").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "serve" / "__init__.py").touch()
        (package / "serve" / "__main__.py").write_text(_SERVER)
        (package / "launch").symlink_to(pathlib.Path(launch.__file__).parent)
        self.folder = root / "work"
        self.folder.mkdir()
        self.mark = uuid.uuid4().hex
        self.prefix: list[str] = []
        self.env = {
            **os.environ,
            "PYTHONPATH": str(root / "path"),
            "HOME": str(root),
            MARK: self.mark,
        }

    def program(self, text: str, name: str = "train.py") -> str:
        """Writes a program; returns its name."""
        (self.folder / name).write_text(text)
        return name

    def launch(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs the launcher, and checks that no process remains."""
        with self.start(*arguments, **env) as started:
            stdout, stderr = started.communicate(timeout=_LIMIT)
        self.expect_nothing_left()
        return subprocess.CompletedProcess(
            arguments, started.returncode, stdout, stderr
        )

    @contextlib.contextmanager
    def start(self, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
        """Starts the launcher; kills it in the end."""
        with subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "replicator.launch", *arguments],
            cwd=self.folder,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as started:
            try:
                yield started
            finally:
                started.kill()

    def processes(self, word: str = "") -> dict[int, str]:
        """Returns the live processes with the mark: their command lines, by id."""
        result = {}
        mark = f"{MARK}={self.mark}".encode()
        for path in pathlib.Path("/proc").iterdir():
            if not path.name.isdecimal() or int(path.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes():
                    line = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                    if line and word in line.decode():
                        result[int(path.name)] = line.decode()
        return result

    def servers(self) -> list[int]:
        """Returns the servers, without their forks: each leads a session."""
        candidates = self.processes("replicator.serve")
        return [pid for pid in candidates if os.getsid(pid) == pid]

    def expect_nothing_left(self) -> None:
        """Fails unless all processes with the mark end soon."""
        wait_until(lambda: not self.processes(), self.processes)


def wait_until(condition: Any, told: Any = lambda: "") -> Any:
    """Returns a condition's result once that is true; fails after minutes."""
    limit = time.monotonic() + _LIMIT
    while not (value := condition()):
        assert time.monotonic() < limit, f"waited in vain: {told()}"
        time.sleep(0.02)
    return value


def line_of(started: subprocess.Popen[str], word: str) -> str:
    """Returns the next line of a launcher's output that has a word; waits for it."""
    assert started.stdout
    while word not in (line := started.stdout.readline()):
        assert line, started.stderr and started.stderr.read()
    return line


def ready(started: subprocess.Popen[str], count: int = 1) -> dict[str, int]:
    """Waits until programs say "ready" and their ids; returns these, by host."""
    pids: dict[str, int] = {}
    while len(pids) < count:
        prefix, _, pid = line_of(started, "ready ").partition("ready ")
        pids[prefix.strip("[] ")] = int(pid)
    return pids


def lines_of(stdout: str, word: str) -> list[str]:
    """Returns the lines that begin with a word, after the prefix, in order of hosts."""
    return sorted(line for line in stdout.splitlines() if f"] {word}" in line)


def only(stderr: str) -> str:
    """Returns the launcher's only line of output."""
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if "replicator.launch:" in line]
    return line
