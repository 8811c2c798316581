# SPDX-License-Identifier: Apache-2.0
"""`python -m replicator.serve`: its output, its errors, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from replicator.cluster import waiting
from tests import forks
from tests.cluster import servers


def _ended(server):
    """Returns the exit status of a server that was told to end."""
    return server.wait(timeout=servers.LIMIT)


_PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-m", "replicator.serve", "--watch=stdin"])
sys.stdin.read()
"""


@pytest.fixture
def parent():
    """A process that starts a server, whose standard input outlives the process."""
    held, kept = os.pipe()
    program = _PARENT.replace('"])', f'"], stdin={held})')
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        pass_fds=[held],
        env=servers.environment(),
    )
    yield process
    process.kill()
    for end in (held, kept):
        os.close(end)
    process.communicate()


@pytest.mark.slow
def test_what_it_says_and_that_it_ends():
    """Three servers at once, as each takes seconds to start."""
    flags = ("--cpus=3", "--host=localhost")
    closed, killed, unwatched = started = [
        servers.start(*flags, stderr=subprocess.PIPE),
        servers.start("--watch=none"),
        servers.start("--watch=none", stdin=subprocess.DEVNULL),
    ]
    try:
        said = [servers.facts(server) for server in started]
        for server, facts in zip(started, said, strict=True):
            assert waiting.ask(facts["address"], 60.0) is None
            assert facts["pid"] == server.pid
            assert facts["replicator-serve"] == 1
            assert facts["host"] == socket.gethostname()
            assert facts["gpus"] == 0
            assert facts["answers"] == "this machine"
        assert [facts["cpus"] for facts in said] == [3, 1, 1]
        assert said[0]["address"].startswith("localhost:")
        assert os.getsid(closed.pid) == closed.pid
        assert os.getsid(killed.pid) == os.getsid(0)
        port = said[0]["address"].rpartition(":")[2]
        taken = _refused(f"--port={port}")
        assert taken == f"port {port} cannot be used: address already in use; " + (
            "--port=0 takes a free one"
        )
        closed.stdin.close()
        assert _ended(closed) == 0
        assert "whoever reaches" not in closed.stderr.read()
        assert closed.stdout.read() == ""
        killed.stdin.close()
        killed.terminate()
        assert _ended(killed) == -signal.SIGTERM
        assert unwatched.poll() is None
    finally:
        for server in started:
            server.kill()
            server.wait()
            for stream in (server.stdin, server.stdout, server.stderr):
                with contextlib.suppress(OSError, AttributeError):
                    stream.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a parent-death signal")
def test_it_ends_with_its_parent(parent):
    facts = servers.facts(parent)
    assert waiting.ask(facts["address"], 60.0) is None
    parent.kill()
    deadline = time.monotonic() + 60
    while waiting.ask(facts["address"], 60.0) != "connection refused":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _refused(*flags):
    result = forks.run(["-m", "replicator.serve", *flags], servers.environment())
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert result.stderr.endswith("\n")
    messages = forks.own_lines(result.stderr)
    assert len(messages) == 1, result.stderr
    return messages[0]


REFUSED = {
    ("--port=x",): "flag --port=x",
    ("--cpus=0",): "flag --cpus=0",
    ("--bananas",): "Unknown command line flag 'bananas'",
    ("extra",): "unknown argument 'extra'",
    ("--host=a:4",): "--host=a:4 has a port: give it as --port=4",
    ("--host=a b",): "--host: 'a b' is not an address",
    ("--host=0.0.0.0", "--insecure"): "--host=0.0.0.0 is not an address to connect to",
    ("--host=10.0.0.1",): "--host=10.0.0.1 is not a loopback address, and TensorFlow's "
    "servers ask for no password: whoever reaches the port can run code as this user; "
    "pass --insecure to accept that",
    ("--peers=host-b",): "--peers: 'host-b' is not the number of a host",
}


_TRY_EACH = """
import contextlib, io, json, sys
from absl import app, flags
from replicator import command_line
from replicator.serve import __main__ as serve

def tried(arguments):
    sys.argv, out, error = ["serve", *arguments], io.StringIO(), io.StringIO()
    for name in ("port", "host", "cpus", "watch", "insecure", "peers"):
        flags.FLAGS[name].unparse()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            app.run(serve.main, flags_parser=command_line.parse)
        except SystemExit as end:
            return end.code, out.getvalue(), error.getvalue()

print(json.dumps([tried(arguments) for arguments in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def refusals():
    """The outcome of each of REFUSED, in one process."""
    command = ["-c", _TRY_EACH, json.dumps([*REFUSED])]
    result = forks.run(command, servers.environment())
    assert result.returncode == 0, result.stderr
    return dict(zip(REFUSED, json.loads(result.stdout), strict=True))


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_bad_flags_are_one_line(refusals, flags):
    status, out, error = refusals[flags]
    assert REFUSED[flags] in error
    assert (status, out, error.count("\n")) == (2, "", 1)
