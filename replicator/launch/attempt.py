# SPDX-License-Identifier: Apache-2.0
"""One attempt at running a job: how every mode starts and ends its processes."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

from replicator.launch import keeper
from replicator.launch.flags import Job
from replicator.launch.hosts import LaunchError
from replicator.launch.machines import Machines
from replicator.launch.output import Output
from replicator.launch.processes import Process, exit_status
from replicator.launch.signals import Signals

_OVER = 5.0  # seconds to wait beyond all grace times


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        status: The exit status.
        final: Whether to make no further attempt, as after success or a signal.
        text: Describes the failure to the user.
        port: Whether the failure was a port in use.
    """

    status: int
    final: bool = False
    text: str = ""
    port: bool = False


class Attempt(abc.ABC):
    """One attempt at running a job; each mode has a subclass.

    Args:
        job: The job to launch.
        out: Receives all output.
        signals: The signals that end the attempt.
        restarts: The number of restarts before this attempt.

    Attributes:
        restarts: The number of restarts so far, including those of single processes.
    """

    def __init__(self, job: Job, out: Output, signals: Signals, restarts: int) -> None:
        self._job, self._out, self._signals = job, out, signals
        self.restarts = self._first_restart = restarts
        self._at_once = False  # whether a second signal asked to kill everything

    async def run(self) -> Outcome:
        """Starts all processes, waits for the first end, and ends the others."""
        async with contextlib.AsyncExitStack() as stack:
            # After connections are closed, which need the commands that they run.
            stack.callback(_kill_descendants)
            self._machines = Machines(self._job, self._out, stack)
            try:
                outcome = await self._live(stack)
                if outcome.text and self._signals.first is None:
                    self._out.say(outcome.text)  # first, as ending the rest takes long
            finally:
                await self._end()
        if self._signals.first is None:
            return outcome
        return Outcome(self._status_after_signal(self._signals.first), final=True)

    @property
    @abc.abstractmethod
    def _programs(self) -> Sequence[Process]:
        """The processes of the user's program started so far."""

    @property
    def _servers(self) -> Sequence[Process]:
        """The servers, which the programs need until their end."""
        return ()

    @property
    @abc.abstractmethod
    def _count(self) -> int:
        """The number of programs once all are started."""

    @abc.abstractmethod
    async def _live(self, stack: contextlib.AsyncExitStack) -> Outcome:
        """Starts all processes; waits for one that ends the attempt, or a signal."""

    async def _drain(self) -> None:
        """Shows the last output of processes that have ended."""
        await self._machines.finish()

    def _status_after_signal(self, number: int) -> int:
        statuses = [p.status.result() for p in self._programs if p.status.done()]
        if len(statuses) < self._count:
            return 128 + number
        failed = [status for status in statuses if status != 0]
        return exit_status(failed[0]) if failed else 0  # they may have succeeded

    async def _begin(self, starting: Coroutine[Any, Any, None]) -> Outcome | None:
        """Waits until all processes have started.

        Returns:
            The outcome, if the attempt has ended already.

        Raises:
            LaunchError: The start failed, and this is the first attempt.
        """
        try:
            await self._until_signal(starting)
        except LaunchError as error:
            if self._first_restart == 0:
                raise
            return Outcome(error.status, text=str(error))
        if self._signals.first is not None:
            return Outcome(1)  # unused: a signal has ended the attempt
        return None

    async def _until_signal(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine; cancels it if a signal comes first."""
        task = asyncio.create_task(coroutine)
        await self._first([task])
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif self._signals.first is None:
            task.result()

    async def _first(
        self, futures: Sequence[asyncio.Future[Any]], limit: float | None = None
    ) -> None:
        """Waits for the first of several futures, or for a signal."""
        if self._signals.first is None:
            await asyncio.wait(
                [*futures, self._signals.next()],
                timeout=limit,
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def _end(self) -> None:
        """Ends the programs, and then the servers."""
        interrupted = self._signals.first == signal.SIGINT
        first = signal.SIGINT if interrupted else signal.SIGTERM
        await self._end_these(self._programs, first)
        await self._end_these(self._servers, signal.SIGTERM)
        await self._drain()
        for process in (*self._servers, *self._programs):
            process.abandon()

    async def _end_these(self, processes: Sequence[Process], number: int) -> None:
        """Ends processes; kills them if another signal comes."""
        if self._at_once:
            number = signal.SIGKILL
        limit = 3 * self._job.grace + _OVER
        ended = asyncio.gather(*(process.end(number, limit) for process in processes))
        while not ended.done():
            signalled = self._signals.next()
            futures: list[asyncio.Future[Any]] = [ended, signalled]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                self._at_once = True
                for process in processes:
                    process.send(f"end {int(signal.SIGKILL)}")


def _kill_descendants() -> None:
    for pid in keeper.descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
