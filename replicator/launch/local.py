# SPDX-License-Identifier: Apache-2.0
"""Starts commands on this host."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from replicator.launch import processes
from replicator.launch.commands import Command
from replicator.launch.processes import Process

_STDOUT, _STDERR = 1, 2


class _Child(asyncio.SubprocessProtocol):
    """Tracks the output and the exit of a child process.

    `asyncio.subprocess.Process` would consider a child alive for as long as any process
    holds the other end of its pipes.
    """

    def __init__(self, capture: bool) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        descriptors = (_STDOUT, _STDERR) if capture else ()
        self.readers = {number: asyncio.StreamReader() for number in descriptors}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        for number, reader in self.readers.items():
            pipe: Any = transport.get_pipe_transport(number)
            reader.set_transport(pipe)  # so that the reader limits what it buffers

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.readers[fd].feed_data(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd in self.readers:
            self.readers[fd].feed_eof()

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)


async def start(name: str, command: Command, capture: bool) -> Process:
    """Starts a command under a keeper.

    Args:
        name: The name of the process.
        command: The command.
        capture: Whether to read its output, which is otherwise the launcher's own.
    """
    output = asyncio.subprocess.PIPE if capture else None
    transport, child = await asyncio.get_running_loop().subprocess_exec(
        lambda: _Child(capture),
        sys.executable,
        "-I",
        "-c",
        processes.BOOT,
        name,
        stdin=asyncio.subprocess.PIPE,
        stdout=output,
        stderr=output,
        pass_fds=[command.stdin] if isinstance(command.stdin, int) else [],
        start_new_session=True,  # so that no terminal's Ctrl-C reaches it directly
    )
    stdin: Any = transport.get_pipe_transport(0)
    stdin.write(processes.start(command))

    async def wait() -> int:
        await child.exited
        code = transport.get_returncode()
        assert code is not None
        return code if code >= 0 else 128 - code

    outputs = (child.readers.get(_STDOUT), child.readers.get(_STDERR))
    return Process(name, stdin.write, outputs, wait(), transport.close)
