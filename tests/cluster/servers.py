# SPDX-License-Identifier: Apache-2.0
"""Real servers on loopback, and their clients, each in a process of its own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from replicator.cluster import addresses as addressing

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 240  # seconds; machines may be busy


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a process without GPUs and other clusters."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TF_", "SLURM_", "OMPI_", "REPLICATOR_CLUSTER"))
    }
    quiet = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**inherited, **quiet, "PYTHONPATH": path, **more}


def start(*flags: str, **options: Any) -> subprocess.Popen[str]:
    """Starts `python -m replicator.serve`; it ends with this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "replicator.serve", *flags],
        **{
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
            "env": environment(),
            **options,
        },
    )


def facts(server: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns a server's description of itself once it listens."""
    assert server.stdout is not None
    return json.loads(server.stdout.readline())


@contextlib.contextmanager
def serving(
    count: int, *flags: str, folders: Sequence[pathlib.Path | None] | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Runs servers in this block; yields their descriptions of themselves.

    Args:
        count: The number of servers.
        *flags: The flags of each.
        folders: Their working directories; None: this process's.
    """
    started = [start(*flags, cwd=cwd) for cwd in folders or [None] * count]
    try:
        yield [facts(server) for server in started]
    finally:
        for server in started:
            server.kill()
            server.communicate()


def addresses(told: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the addresses in servers' descriptions."""
    return [facts["address"] for facts in told]


def run_module(
    module: str,
    *arguments: str,
    folder: pathlib.Path = ROOT,
    limit: float = LIMIT,
) -> subprocess.CompletedProcess[str]:
    """Runs a module as a client in a folder; returns its output."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment(TF_CPP_MIN_LOG_LEVEL="2"),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    return result


def run_client(program: str, addresses: Sequence[str], **variables: str) -> Any:
    """Runs a function of tests/cluster/programs.py; returns its result.

    Args:
        program: The function's name.
        addresses: The servers' addresses.
        **variables: Additional environment variables.
    """
    process = subprocess.run(
        [sys.executable, "-m", "tests.cluster.programs", program, *addresses],
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    result = json.loads(process.stdout.splitlines()[-1])
    if isinstance(result, dict):
        result["stderr"] = process.stderr
    return result


@contextlib.contextmanager
def unanswered(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, str]]:
    """Yields a socket that waits for a connection, and the address that is silent.

    A listener with a full backlog does not answer, like a cut link. Skips the test if
    this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(family))
        try:
            server.bind((host, 0))
        except OSError as error:
            pytest.skip(f"there is no {host}: {error}")
        server.listen(0)
        address = server.getsockname()[:2]
        for _ in range(2):  # fills the backlog
            first = stack.enter_context(socket.socket(family))
            first.setblocking(False)
            first.connect_ex(address)
        time.sleep(0.1)
        waiting = stack.enter_context(socket.socket(family))
        waiting.setblocking(False)
        assert waiting.connect_ex(address) == errno.EINPROGRESS
        time.sleep(0.1)
        with pytest.raises(OSError, match="not connected"):
            waiting.getpeername()
        yield waiting, addressing.join(*address)
