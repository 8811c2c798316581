# SPDX-License-Identifier: Apache-2.0
"""Asynchronous mode: every host runs the program; some also serve the variables."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence

from replicator.launch import commands
from replicator.launch.attempt import Attempt, Outcome
from replicator.launch.flags import Job
from replicator.launch.folders import Folder
from replicator.launch.hosts import LaunchError
from replicator.launch.output import Output
from replicator.launch.processes import LOST, Process, ending, exit_status
from replicator.launch.servers import Servers
from replicator.launch.shared import Shared
from replicator.launch.signals import Signals


class Asynchronous(Attempt):
    """One attempt at running the servers, during which programs may restart."""

    def __init__(self, job: Job, out: Output, signals: Signals, restarts: int) -> None:
        super().__init__(job, out, signals, restarts)
        self._serving: Servers | None = None
        self._running: dict[Process, int] = {}  # to the number of the host
        self._replacing: set[asyncio.Task[None]] = set()
        self._ended: list[Process] = []
        self._lost: list[Process] = []  # failed, and not restarted

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
        folder = stack.enter_context(Folder())
        job = commands.with_servers(self._job)
        self._serving = servers = Servers(job, self._machines, Shared(folder))
        if outcome := await self._begin(servers.start(retry=self._first_restart > 0)):
            return outcome
        if outcome := await self._begin(self._start_all(servers)):
            return outcome
        return await self._look_after(servers)

    async def _start_all(self, servers: Servers) -> None:
        indices = range(len(self._job.hosts))
        await self._machines.run_all([self._start(index, servers) for index in indices])

    async def _start(self, index: int, servers: Servers) -> None:
        """Starts the program on a host."""
        job, machines = self._job, self._machines
        cluster = commands.describe_program(job, servers.up, index, machines.sources)
        python = machines.python(index)
        command = commands.part(job, cluster, self.restarts, python, os.getcwd())
        process = await machines.start(index, command)
        self._running[process] = index
        machines.follow(process)
        machines.note(f"{process.name}: the program has started")

    async def _look_after(self, servers: Servers) -> Outcome:
        """Restarts failed programs until all end, a server ends, or a signal comes."""
        try:
            while (self._running or self._replacing) and self._signals.first is None:
                processes = [*servers.processes, *self._running]
                await self._first([*(p.status for p in processes), *self._replacing])
                for process in servers.processes:
                    if process.status.done():
                        return _server_ended(process)
                self._note_ends(servers)
        finally:
            for task in self._replacing:
                task.cancel()
            await asyncio.gather(*self._replacing, return_exceptions=True)
        if not self._lost:
            return Outcome(0, final=True)
        first = self._lost[0].status.result()
        return Outcome(exit_status(first), final=True)

    def _note_ends(self, servers: Servers) -> None:
        """Removes programs that have ended, and restarts those that failed."""
        for task in [task for task in self._replacing if task.done()]:
            self._replacing.remove(task)
            task.result()
        for process in [p for p in self._running if p.status.done()]:
            index = self._running.pop(process)
            self._ended.append(process)
            if process.status.result() != 0:
                replacement = self._replace(process, index, servers)
                self._replacing.add(asyncio.create_task(replacement))

    async def _replace(self, process: Process, index: int, servers: Servers) -> None:
        """Restarts a failed program, unless all restarts are used up."""
        await self._machines.finish(process)
        status = process.status.result()
        text = f"{process.name}: the program has ended: {ending(status)}"
        if self.restarts < self._job.max_restarts:
            self.restarts += 1
            count = f"{self.restarts} of {self._job.max_restarts}"
            self._out.say(f"{text}; restarting it, {count}")
            try:
                await process.all_ended()
                if status == LOST:
                    async with asyncio.timeout(self._job.start_timeout):
                        await self._machines.reach_again(index)
                await self._start(index, servers)
                self._ended.remove(process)
                return
            except (LaunchError, TimeoutError) as error:
                text = f"{process.name}: not up again: {error or 'not in time'}"
        self._lost.append(process)
        remaining = len(self._running) + len(self._replacing) - 1
        outlook = (
            f"; {remaining} of {self._count} programs continue" if remaining else ""
        )
        self._out.say(text + outlook)


def _server_ended(process: Process) -> Outcome:
    status = process.status.result()
    text = f"{process.name}: its server has ended, with the variables on it: "
    return Outcome(exit_status(status) or 1, text=text + ending(status))
