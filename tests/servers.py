"""Servers of hosts on this machine, for tests: real processes on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """Returns the environment of a process that imports this checkout from anywhere."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def started(
    count: int, cpus: int, folders: Sequence[pathlib.Path] | None = None
) -> Iterator[list[str]]:
    """Starts so many servers and gives their addresses; ends them behind the block.

    Args:
        count: How many.
        cpus: The CPU devices of each.
        folders: Where each runs; None: here.
    """
    command = [sys.executable, "-m", "replicator.serve", f"--cpus={cpus}"]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    cwd=folders[k] if folders else None,
                    env=environment(),
                )
            )
            for k in range(count)
        ]
        for server in servers:  # before they are waited for, at the end
            stack.callback(server.kill)
        yield [_address(server) for server in servers]


def _address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line, "a server ended before it listened"
    return str(json.loads(line)["address"])
