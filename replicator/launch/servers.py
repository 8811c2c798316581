# SPDX-License-Identifier: Apache-2.0
"""Starts one server on each host, and waits until all say that they are up."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from replicator.launch import commands, ssh
from replicator.launch.commands import Serving
from replicator.launch.flags import Job
from replicator.launch.hosts import LaunchError
from replicator.launch.machines import Machines, together
from replicator.launch.processes import LOST, Process, ending, exit_status
from replicator.launch.shared import Shared


class Servers:
    """The servers of a job.

    Args:
        job: What is launched.
        machines: Its hosts.
        shared: What the program is told meanwhile.

    Attributes:
        processes: Those that were started, also while others are being started.
        cluster: Once `start` has returned: the description of the cluster.
    """

    def __init__(self, job: Job, machines: Machines, shared: Shared) -> None:
        self._job, self._machines, self._shared = job, machines, shared
        self._up: list[Serving | None] = []
        self.processes: list[Process] = []
        self.cluster = ""

    async def start(self, retry: bool) -> None:
        """Starts all.

        Args:
            retry: Whether a host that cannot be reached may come back in time.

        Raises:
            LaunchError: One does not start, or not in time.
        """
        async with self._machines.in_time():
            await self._machines.reach(retry)
            addresses = self._machines.addresses
            self._up = await together(
                [
                    self._serve(index, commands.any_port(address))
                    for index, address in enumerate(addresses[: len(self._job.hosts)])
                ]
            )
        self._describe()

    def _describe(self) -> None:
        self.cluster = commands.describe(
            self._job, self._machines.client, self._up, self._shared.path
        )
        self._shared.describe(self.cluster)

    @property
    def up(self) -> list[Serving]:
        """What those that are up say of themselves."""
        return [up for up in self._up if up is not None]

    @property
    def count(self) -> int:
        """How many there are, with those that are being started again."""
        return sum(up is not None for up in self._up)

    @property
    def can_restart(self) -> bool:
        """Whether one can be started without all others: a tunnel is of all."""
        return self._machines.tunnel is None

    async def restart(self, process: Process) -> None:
        """Starts one again that has ended, to listen where it did.

        Raises:
            LaunchError: It does not start, or not in time.
        """
        index = self._index(process)
        host, up = self._job.hosts[index], self._up[index]
        assert up
        self._machines.waiting.append(host.name)
        limit = self._job.start_timeout
        try:
            async with asyncio.timeout(limit):
                if process.status.result() == LOST:
                    await self._machines.reach_again(index)
                await self._serve(index, up.address)
        except TimeoutError as error:
            text = f"{host.name}: not up after {limit:g} seconds"
            raise LaunchError(text, 1) from error

    def leave_out(self, process: Process) -> None:
        """Has the program go on without one that has ended, or is not up in time."""
        self._up[self._index(process)] = None
        for own in [own for own in self.processes if own.name == process.name]:
            own.send(f"end {int(signal.SIGKILL)}")  # it may be there, and not be up
            self.processes.remove(own)
        self._describe()

    def _index(self, process: Process) -> int:
        return [host.name for host in self._job.hosts].index(process.name)

    async def _serve(self, index: int, listen: str) -> Serving:
        """Starts a server, and returns what it says once it is up."""
        machines, host = self._machines, self._job.hosts[index]
        if machines.tunnel:
            listen = machines.tunnel.listen(index)
        python = machines.python(index)
        command = commands.server(self._job, host, listen, python, os.getcwd())
        process = await machines.start(index, command)
        self.processes.append(process)
        up: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()

        def look(line: bytes) -> bool:
            found = None if up.done() else commands.serving(line)
            if found:
                up.set_result(found)
            return found is not None

        machines.follow(process, look)
        either: list[asyncio.Future[Any]] = [up, process.status]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            await machines.finish(process)
            status = process.status.result()
            said = ssh.last_line(machines.last.get(host.name, b"")) or ending(status)
            text = f"{host.name}: its server has ended before it was up: {said}"
            raise LaunchError(text, exit_status(status) or 1)
        machines.is_ready(host.name)
        machines.note(f"{host.name}: its server is up at {up.result().address}")
        return up.result()
