# SPDX-License-Identifier: Apache-2.0
"""A command under a keeper, on whatever host: how it is started, ended, waited for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import pathlib
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from replicator.launch import keeper
from replicator.launch.commands import Command
from replicator.launch.output import Reader

# Reads byte by byte, so that what follows the line is left to the keeper.
BOOT = (
    "import json;given=json.loads(open(0,'rb',buffering=0,closefd=False).readline());"
    "exec(compile(given['source'],'<replicator keeper>','exec'))"
)
_SILENCES = 6  # heartbeats without one of them after which a keeper gives up
LOST = -1  # the status of a process whose host is out of reach
_LOST_STATUS = 255  # what the launcher then exits with, as ssh does


class Process:
    """A command that runs under a keeper.

    Args:
        name: Of its host, or "program".
        write: Sends bytes to the keeper.
        outputs: Its standard output and error; None where it shares the launcher's.
        wait: Returns the status, as shells have it, or LOST, once all has ended: the
            command and what it has left behind.
        abandon: Lets go of it, and of its output; what has not ended is killed.

    Attributes:
        abandon: As given.
        status: A future, done with the status once the command has ended. Something
            that it has left behind may still be there if its keeper announces its end.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[bytes], None],
        outputs: tuple[Reader | None, Reader | None],
        wait: Awaitable[int],
        abandon: Callable[[], None],
    ) -> None:
        self.name = name
        self.outputs = outputs
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._all = asyncio.ensure_future(wait)
        self._all.add_done_callback(self._all_has_ended)
        self.abandon = abandon
        self._write = write

    def has_ended(self, status: int) -> None:
        """Notes that the command has ended."""
        if not self.status.done():
            self.status.set_result(status)

    def _all_has_ended(self, all_: asyncio.Future[int]) -> None:
        if all_.cancelled():
            self.status.cancel()
        elif error := all_.exception():
            self.status.set_exception(error)
        else:
            self.has_ended(all_.result())

    async def all_ended(self) -> None:
        """Waits until what the command has left behind has ended, too."""
        await asyncio.wait([self._all])

    def send(self, line: str) -> None:
        """Tells the keeper something; one that has ended does not hear it."""
        with contextlib.suppress(OSError, RuntimeError):
            self._write(f"{line}\n".encode())

    async def end(self, number: int, limit: float) -> None:
        """Ends it, beginning with a signal, and waits until it has ended.

        Args:
            number: The signal; sterner ones follow.
            limit: Seconds after which it is let go of, wherever it hangs.
        """
        self.send(f"end {number}")
        done, _ = await asyncio.wait([self._all], timeout=limit)
        if not done:
            self.abandon()


def start(command: Command, silence: float | None = None) -> bytes:
    """Returns the line that has a keeper start a command.

    Args:
        command: The command.
        silence: Seconds after which a keeper that hears nothing gives up, or None.
    """
    spec: dict[str, Any] = {**dataclasses.asdict(command), "silence": silence}
    return json.dumps({"source": source_of(keeper), "spec": spec}).encode() + b"\n"


def source_of(module: Any) -> str:
    """Returns the source of a module that needs the standard library only."""
    return pathlib.Path(inspect.getfile(module)).read_text()


def silence(heartbeat: float) -> float:
    """Returns for how long a keeper on another host may hear nothing, in seconds."""
    return _SILENCES * heartbeat


def ending(status: int) -> str:
    """Returns how a process with a status has ended, in words.

    Example:
        >>> from replicator.launch import processes
        >>> processes.ending(137), processes.ending(1)
        ('killed by SIGKILL', 'status 1')
    """
    if status == LOST:
        return "the connection to its host is lost"
    if status - 128 in {*signal.Signals}:
        return f"killed by {signal.Signals(status - 128).name}"
    return f"status {status}"


def exit_status(status: int) -> int:
    """Returns what the launcher exits with for the status of a process."""
    return _LOST_STATUS if status == LOST else status
