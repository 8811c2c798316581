# SPDX-License-Identifier: Apache-2.0
"""Asynchronous mode: every host runs the program, and some a server with variables."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Sequence

from replicator.launch import commands
from replicator.launch.attempt import Attempt, Outcome
from replicator.launch.flags import Job
from replicator.launch.hosts import LaunchError
from replicator.launch.machines import together
from replicator.launch.output import Output
from replicator.launch.processes import LOST, Process, ending, exit_status
from replicator.launch.servers import Servers
from replicator.launch.shared import Shared
from replicator.launch.signals import Signals


class Asynchronous(Attempt):
    """One life of the servers, in which programs come and go."""

    def __init__(self, job: Job, out: Output, signals: Signals, restarts: int) -> None:
        super().__init__(job, out, signals, restarts)
        self._serving: Servers | None = None
        self._running: dict[Process, int] = {}  # by the number of the host
        self._ended: list[Process] = []
        self._lost: list[Process] = []  # failed for good

    @property
    def _programs(self) -> Sequence[Process]:
        return [*self._ended, *self._running]

    @property
    def _servers(self) -> Sequence[Process]:
        return self._serving.processes if self._serving else ()

    @property
    def _count(self) -> int:
        return len(self._job.hosts)

    async def _live(self, stack: contextlib.AsyncExitStack) -> Outcome:
        folder = stack.enter_context(tempfile.TemporaryDirectory("-replicator"))
        job = commands.with_servers(self._job)
        self._serving = servers = Servers(job, self._machines, Shared(folder))
        if ended := await self._begin(servers.start(retry=self._before > 0)):
            return ended
        if ended := await self._begin(self._start_all(servers)):
            return ended
        return await self._look_after(servers)

    async def _start_all(self, servers: Servers) -> None:
        everyone = range(len(self._job.hosts))
        await together([self._start(index, servers) for index in everyone])

    async def _start(self, index: int, servers: Servers) -> None:
        """Starts the program on a host."""
        job, machines = self._job, self._machines
        cluster = commands.describe_program(job, servers.up, index)
        python = machines.python(index)
        command = commands.part(job, cluster, self.restarts, python, os.getcwd())
        process = await machines.start(index, command)
        self._running[process] = index
        machines.follow(process)
        machines.is_ready(process.name)
        machines.note(f"{process.name}: the program is started")

    async def _look_after(self, servers: Servers) -> Outcome:
        """Waits until all programs have ended, or a server has, or for a signal."""
        while self._running and self._signals.first is None:
            serving = [process.status for process in servers.processes]
            await self._first([*serving, *(p.status for p in self._running)])
            for process in servers.processes:
                if process.status.done():
                    return _server_ended(process)
            for process in [p for p in self._running if p.status.done()]:
                await self._replace(process, servers)
        if not self._lost:
            return Outcome(0, final=True)
        first = self._lost[0].status.result()
        return Outcome(exit_status(first), final=True)

    async def _replace(self, process: Process, servers: Servers) -> None:
        """Starts a program again that has failed, as often as that may be."""
        index = self._running.pop(process)
        self._ended.append(process)
        status = process.status.result()
        if status == 0 or self._signals.first is not None:
            return
        await self._machines.finish(process)
        text = f"{process.name}: the program has ended: {ending(status)}"
        if self.restarts < self._job.max_restarts:
            self.restarts += 1
            count = f"{self.restarts} of {self._job.max_restarts}"
            self._out.say(f"{text}; starting it again, {count}")
            try:
                if status == LOST:
                    async with asyncio.timeout(self._job.start_timeout):
                        await self._machines.reach_again(index)
                await self._start(index, servers)
                self._ended.remove(process)
                return
            except (LaunchError, TimeoutError) as error:
                text = f"{process.name}: not up again: {error or 'not in time'}"
        self._lost.append(process)
        left = f"{len(self._running)} of {self._count} programs"
        self._out.say(f"{text}; {left} go on" if self._running else text)


def _server_ended(process: Process) -> Outcome:
    status = process.status.result()
    text = f"{process.name}: its server has ended, with the variables on it: "
    return Outcome(exit_status(status) or 1, text=text + ending(status))
