# SPDX-License-Identifier: Apache-2.0
"""Starts the user's program on each host, where the programs join each other."""

from __future__ import annotations

import asyncio
import json
import os

from replicator.launch import commands, ports, processes, ssh
from replicator.launch.commands import Command
from replicator.launch.flags import Job
from replicator.launch.hosts import LaunchError
from replicator.launch.machines import Machines
from replicator.launch.processes import Process
from replicator.launch.ssh import Remote

_FAILED = 255
_LOST = b"HostLostError"  # the error of a program whose steps need a host that is lost


class Programs:
    """The programs of a job.

    Args:
        job: The job to launch.
        machines: Its hosts.
        restarts: The number of earlier restarts.

    Attributes:
        processes: The processes started so far, even while others are being started.
        failed: The processes that have failed, in order of failure.
        running: The future statuses of the processes that still run.
        port_in_use: Whether a program could not listen at its address.
        tells_of_others: Whether a program reported the loss of another one's host.
    """

    def __init__(self, job: Job, machines: Machines, restarts: int) -> None:
        self._job, self._machines, self._restarts = job, machines, restarts
        self.processes: list[Process] = []
        self.failed: list[Process] = []
        self.running: list[asyncio.Future[int]] = []
        self.port_in_use = False
        self.tells_of_others = False

    async def start(self, retry: bool) -> None:
        """Finds a free port on each host, and then starts all programs.

        Args:
            retry: Whether to wait for hosts that cannot be reached yet.

        Raises:
            LaunchError: A program does not start in time.
        """
        indices = range(len(self._job.hosts))
        async with self._machines.in_time():
            await self._machines.reach(retry)
            addresses: list[str] = []
            while len({*addresses}) < len(indices):  # two names may mean one host
                searches = [self._address(index) for index in indices]
                addresses = await self._machines.run_all(searches)
            starting = [self._start(index, addresses) for index in indices]
            await self._machines.run_all(starting)

    async def _address(self, index: int) -> str:
        """Returns the address at which a host's TensorFlow server must listen."""
        machines, remote = self._machines, self._machines.remotes[index]
        port = ports.free_port() if remote is None else await self._ask(remote)
        if machines.tunnel:
            return machines.tunnel.listen(index)
        return commands.with_port(machines.addresses[index], port)

    async def _ask(self, remote: Remote) -> int:
        """Returns a free port of another host.

        Raises:
            LaunchError: The host cannot be asked.
        """
        argv = (remote.python, "-I", "-c", processes.source_of(ports))
        status, stdout, stderr = await remote.run(Command(argv, {}, os.getcwd()))
        try:
            return int(json.loads(stdout.splitlines()[-1]))
        except (ValueError, IndexError, TypeError) as error:
            reason = ssh.last_line(stderr) or processes.ending(status)
            text = f"{remote.host.name}: no free port was found: {reason}"
            raise LaunchError(text, _FAILED) from error

    async def _start(self, index: int, addresses: list[str]) -> None:
        job, machines, address = self._job, self._machines, addresses[index]
        cluster = commands.describe_part(job, addresses, index, machines.sources)
        python = machines.python(index)
        command = commands.part(job, cluster, self._restarts, python, os.getcwd())
        process = await machines.start(index, command)
        self.processes.append(process)
        self.running.append(process.status)
        process.status.add_done_callback(lambda _: self._note_end(process))

        def look(line: bytes) -> bool:
            self.port_in_use |= commands.is_port_in_use(line, address)
            self.tells_of_others |= _LOST in line
            return False

        machines.follow(process, on_error=look)
        machines.note(
            f"{process.name}: the program has started; it listens at {address}"
        )

    def _note_end(self, process: Process) -> None:
        self.running.remove(process.status)
        if not process.status.cancelled() and process.status.result() != 0:
            self.failed.append(process)
