"""Starts commands on this host."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from replicator.launch import processes
from replicator.launch.commands import Command
from replicator.launch.processes import Process


async def start(name: str, command: Command, capture: bool) -> Process:
    """Starts a command under a keeper.

    Args:
        name: Of the process.
        command: The command.
        capture: Whether its output is read; it shares the launcher's otherwise.
    """
    output = asyncio.subprocess.PIPE if capture else None
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-c",
        processes.BOOT,
        name,
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=output,
        pass_fds=[command.stdin] if isinstance(command.stdin, int) else [],
        start_new_session=True,  # no terminal's Ctrl-C reaches it by itself
    )
    assert child.stdin
    child.stdin.write(processes.start(command))

    async def wait() -> int:
        code = await child.wait()
        return code if code >= 0 else 128 - code

    def abandon() -> None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()

    outputs = (child.stdout, child.stderr)
    return Process(name, child.stdin.write, outputs, wait(), abandon)
