# SPDX-License-Identifier: Apache-2.0
"""Starts, ends and waits for a command under a keeper, on any host."""

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

# Reads unbuffered, so that everything after the first line is left to the keeper.
BOOT = (
    "import json;given=json.loads(open(0,'rb',buffering=0,closefd=False).readline());"
    "exec(compile(given['source'],'<replicator keeper>','exec'))"
)
_SILENCES = 6  # heartbeats of silence after which a keeper gives up
LOST = -1  # the status of a process whose host is out of reach
_LOST_STATUS = 255  # the launcher's exit status for LOST, as of ssh


class Process:
    """A command that runs under a keeper.

    Args:
        name: The name of its host, or "program".
        write: Sends bytes to the keeper.
        outputs: Its standard output and error; None if it shares the launcher's.
        wait: Returns the status, as in a shell, or LOST, once the command and all its
            descendants have ended.
        abandon: Drops the process and its output; kills what has not ended.

    Attributes:
        abandon: The argument of that name.
        status: A future of the command's status. Descendants may outlive the command if
            its keeper announces its end.
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
        """Records the status of the command, which has ended."""
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
        """Waits until the command's descendants have ended, too."""
        await asyncio.wait([self._all])

    def send(self, line: str) -> None:
        """Sends a line to the keeper; does nothing if the keeper has ended."""
        with contextlib.suppress(OSError, RuntimeError):
            self._write(f"{line}\n".encode())

    async def end(self, number: int, limit: float) -> None:
        """Ends the command and its descendants, and waits for them.

        Args:
            number: The first signal; stronger ones follow.
            limit: Seconds after which the process is abandoned if it hangs.
        """
        self.send(f"end {number}")
        done, _ = await asyncio.wait([self._all], timeout=limit)
        if not done:
            self.abandon()


def start(command: Command, silence: float | None = None) -> bytes:
    """Returns the line that makes a keeper start a command.

    Args:
        command: The command.
        silence: Seconds without input after which the keeper gives up, or None.
    """
    spec: dict[str, Any] = {**dataclasses.asdict(command), "silence": silence}
    return json.dumps({"source": source_of(keeper), "spec": spec}).encode() + b"\n"


def source_of(module: Any) -> str:
    """Returns the source of a module that needs only the standard library."""
    return pathlib.Path(inspect.getfile(module)).read_text()


def silence(heartbeat: float) -> float:
    """Returns how many seconds a keeper on another host may go without input."""
    return _SILENCES * heartbeat


def ending(status: int) -> str:
    """Describes the end of a process with a given status.

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
    """Returns the launcher's exit status for the status of a process."""
    return _LOST_STATUS if status == LOST else status
