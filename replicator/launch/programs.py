# SPDX-License-Identifier: Apache-2.0
"""Starts the user's program on each host, as one of those that join one another."""

from __future__ import annotations

import asyncio
import json
import os

from replicator.launch import commands, ports, processes, ssh
from replicator.launch.commands import Command
from replicator.launch.flags import Job
from replicator.launch.hosts import LaunchError
from replicator.launch.machines import Machines, together
from replicator.launch.processes import Process
from replicator.launch.ssh import Remote

_FAILED = 255


class Programs:
    """The programs of a job.

    Args:
        job: What is launched.
        machines: Its hosts.
        restarts: How often all was started anew before.

    Attributes:
        processes: Those that were started, also while others are being started.
        failed: Those of them that have failed, in the order in which they did.
        left: What those that have not ended yet will end with.
        port_taken: Whether one could not listen where it should.
    """

    def __init__(self, job: Job, machines: Machines, restarts: int) -> None:
        self._job, self._machines, self._restarts = job, machines, restarts
        self.processes: list[Process] = []
        self.failed: list[Process] = []
        self.left: list[asyncio.Future[int]] = []
        self.port_taken = False

    async def start(self, retry: bool) -> None:
        """Finds a port on each host, and then starts all.

        Args:
            retry: Whether a host that cannot be reached may come back in time.

        Raises:
            LaunchError: One does not start, or not in time.
        """
        everyone = range(len(self._job.hosts))
        async with self._machines.in_time():
            await self._machines.reach(retry)
            found: list[str] = []
            while len({*found}) < len(everyone):  # hosts may be one under two names
                found = await together([self._address(index) for index in everyone])
            await together([self._start(index, found) for index in everyone])

    async def _address(self, index: int) -> str:
        """Returns where TensorFlow's server of a host is to listen."""
        machines, remote = self._machines, self._machines.remotes[index]
        port = ports.free_port() if remote is None else await self._ask(remote)
        if machines.tunnel:
            return machines.tunnel.listen(index)
        return commands.with_port(machines.addresses[index], port)

    async def _ask(self, remote: Remote) -> int:
        """Returns a port that is free on another host.

        Raises:
            LaunchError: It cannot be asked, or has no such program.
        """
        script = "" if self._job.program[0] == "-m" else self._job.program[0]
        source = processes.source_of(ports)
        argv = (remote.python, "-I", "-c", source, script)
        status, said, told = await remote.run(Command(argv, {}, os.getcwd()))
        name = remote.host.name
        try:
            facts = json.loads(said.splitlines()[-1])
        except (ValueError, IndexError) as error:
            why = ssh.last_line(told) or processes.ending(status)
            raise LaunchError(f"{name}: no port is found: {why}", _FAILED) from error
        if facts["missing"]:
            raise LaunchError(
                f"{name}: there is no {script} in {facts['folder']}; --sync copies the "
                "working directory"
            )
        return int(facts["port"])

    async def _start(self, index: int, addresses: list[str]) -> None:
        job, machines, own = self._job, self._machines, addresses[index]
        cluster = commands.describe_part(job, addresses, index)
        python = machines.python(index)
        command = commands.part(job, cluster, self._restarts, python, os.getcwd())
        process = await machines.start(index, command)
        self.processes.append(process)
        self.left.append(process.status)
        process.status.add_done_callback(lambda _: self._note_end(process))

        def look(line: bytes) -> bool:
            self.port_taken |= commands.is_port_taken(line, own)
            return False

        machines.follow(process, on_error=look)
        machines.is_ready(process.name)
        machines.note(f"{process.name}: the program is started; it listens at {own}")

    def _note_end(self, process: Process) -> None:
        self.left.remove(process.status)
        if not process.status.cancelled() and process.status.result() != 0:
            self.failed.append(process)
