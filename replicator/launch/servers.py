# SPDX-License-Identifier: Apache-2.0
"""Starts one server on each host, and waits until all have announced themselves."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from replicator.launch import commands, ssh
from replicator.launch.commands import Serving
from replicator.launch.flags import Job
from replicator.launch.hosts import LaunchError
from replicator.launch.machines import Machines
from replicator.launch.processes import LOST, Process, ending, exit_status
from replicator.launch.shared import Shared


class Servers:
    """The servers of a job.

    Args:
        job: The job to launch.
        machines: Its hosts.
        shared: The files through which the program learns of changes.

    Attributes:
        processes: The processes started so far, even while others are being started.
        cluster: The description of the cluster, set by `start`.
    """

    def __init__(self, job: Job, machines: Machines, shared: Shared) -> None:
        self._job, self._machines, self._shared = job, machines, shared
        self._up: list[Serving | None] = []
        self.processes: list[Process] = []
        self.cluster = ""

    async def start(self, retry: bool) -> None:
        """Starts all servers.

        Args:
            retry: Whether to wait for hosts that cannot be reached yet.

        Raises:
            LaunchError: A server does not start in time.
        """
        async with self._machines.in_time():
            await self._machines.reach(retry)
            addresses = self._machines.addresses
            self._up = await self._machines.run_all(
                [
                    self._serve(index, commands.any_port(address))
                    for index, address in enumerate(addresses[: len(self._job.hosts)])
                ]
            )
        if self._machines.is_open:
            names = [host.name for host in self._job.hosts]
            self._machines.say(commands.answers(names, self.up))
        self._describe()

    def _describe(self) -> None:
        self.cluster = commands.describe(
            self._job,
            self._machines.client,
            self._up,
            self._shared.path,
            self._machines.sources,
        )
        self._shared.describe(self.cluster)

    @property
    def up(self) -> list[Serving]:
        """The announced facts of the servers in use."""
        return [server for server in self._up if server is not None]

    @property
    def count(self) -> int:
        """The number of servers, including those that are being restarted."""
        return sum(server is not None for server in self._up)

    @property
    def can_restart(self) -> bool:
        """Whether a single server can be restarted: a tunnel spans all of them."""
        return self._machines.tunnel is None

    async def restart(self, process: Process) -> None:
        """Restarts a server that has ended, at its previous address.

        Raises:
            LaunchError: The server does not start in time.
        """
        index = self._index(process)
        host, serving = self._job.hosts[index], self._up[index]
        assert serving
        limit = self._job.start_timeout
        try:
            async with asyncio.timeout(limit):
                if process.status.result() == LOST:
                    await self._machines.reach_again(index)
                await self._serve(index, serving.address)
        except TimeoutError as error:
            text = f"{host.name}: not up after {limit:g} seconds"
            raise LaunchError(text, 1) from error

    def leave_out(self, process: Process) -> None:
        """Removes a server that has ended, or was not up in time, from the cluster."""
        self._up[self._index(process)] = None
        for server in [p for p in self.processes if p.name == process.name]:
            server.send(f"end {int(signal.SIGKILL)}")  # it may run and not be up
            self.processes.remove(server)
        self._describe()

    def _index(self, process: Process) -> int:
        return [host.name for host in self._job.hosts].index(process.name)

    async def _serve(self, index: int, listen: str) -> Serving:
        """Starts a server, and returns the facts that it announces once it is up."""
        machines, host = self._machines, self._job.hosts[index]
        if machines.tunnel:
            listen = machines.tunnel.listen(index)
        python = machines.python(index)
        command = commands.server(
            self._job, host, listen, python, os.getcwd(), machines.sources
        )
        process = await machines.start(index, command)
        self.processes.append(process)
        up: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()

        def look(line: bytes) -> bool:
            facts = None if up.done() else commands.serving(line)
            if facts:
                up.set_result(facts)
            return facts is not None

        machines.follow(process, look)
        futures: list[asyncio.Future[Any]] = [up, process.status]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            await machines.finish(process)
            status = process.status.result()
            reason = ssh.last_line(machines.last.get(host.name, b"")) or ending(status)
            text = f"{host.name}: its server ended before it was up: {reason}"
            raise LaunchError(text, exit_status(status) or 1)
        machines.note(f"{host.name}: its server is up at {up.result().address}")
        return up.result()
