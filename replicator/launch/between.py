# SPDX-License-Identifier: Apache-2.0
"""Between-graph mode: every host runs the program, and there are no servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence

from replicator.launch import commands, processes, questions, ssh
from replicator.launch.attempt import Attempt, Outcome
from replicator.launch.commands import Command
from replicator.launch.flags import Job
from replicator.launch.hosts import LaunchError
from replicator.launch.machines import Machines
from replicator.launch.output import Output
from replicator.launch.processes import LOST, Process, ending, exit_status
from replicator.launch.signals import Signals
from replicator.launch.ssh import Remote

# The statuses of programs that fail first and make others fail: the host is lost, or
# the program was killed, as by its keeper if it is silent.
_CAUSES = (LOST, 128 + signal.SIGKILL)
# Seconds, or this fraction of a heartbeat if longer, for such a status to arrive after
# another program has failed: programs may notice a silent one before the launcher does.
# That may take a whole heartbeat, for which to wait if a program
# reports a lost host.
_WAIT, _WAIT_PART = 0.5, 0.2
_FAILED = 255
_LOST = b"HostLostError"  # the error of a program whose steps need a host that is lost


class Between(Attempt):
    """One attempt at running the programs of all hosts."""

    def __init__(self, job: Job, out: Output, signals: Signals, restarts: int) -> None:
        super().__init__(job, out, signals, restarts)
        self._running: Programs | None = None

    @property
    def _programs(self) -> Sequence[Process]:
        return self._running.processes if self._running else ()

    @property
    def _count(self) -> int:
        return len(self._job.hosts)

    async def _live(self, stack: contextlib.AsyncExitStack) -> Outcome:
        self._running = programs = Programs(
            self._job, self._machines, self._first_restart
        )
        if outcome := await self._begin(programs.start(retry=self._first_restart > 0)):
            return outcome
        await self._first_failure(programs)
        if not programs.failed:  # all have succeeded, or a signal has come
            return Outcome(0, final=True)
        cause = await self._cause(programs)
        await self._machines.finish(cause)  # its output may say that its port is taken
        status = cause.status.result()
        return Outcome(
            exit_status(status),
            text=f"{cause.name}: the program has ended: {ending(status)}",
            port=programs.port_in_use,
        )

    async def _first_failure(self, programs: Programs) -> None:
        """Waits for the first failure, the end of all programs, or a signal."""
        while not programs.failed and self._signals.first is None:
            if not programs.running:
                return
            await self._first(programs.running)

    async def _cause(self, programs: Programs) -> Process:
        """Returns the program whose failure caused the others, as far as known."""
        clock = asyncio.get_running_loop().time
        start = clock()
        while True:
            part = 1.0 if programs.tells_of_others else _WAIT_PART
            deadline = start + max(_WAIT, part * self._job.heartbeat)
            for process in programs.failed:
                if process.status.result() in _CAUSES:
                    return process
            remaining = deadline - clock()
            is_over = remaining <= 0 or self._signals.first is not None
            if not programs.running or is_over:
                return programs.failed[0]
            await self._first(programs.running, remaining)


class Programs:
    """The programs of a job, which join each other.

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
        port = questions.free_port() if remote is None else await self._ask(remote)
        if machines.tunnel:
            return machines.tunnel.listen(index)
        return commands.with_port(machines.addresses[index], port)

    async def _ask(self, remote: Remote) -> int:
        """Returns a free port of another host.

        Raises:
            LaunchError: The host cannot be asked.
        """
        argv = (remote.python, "-I", "-c", processes.source_of(questions), "port")
        status, stdout, stderr = await remote.run(Command(argv, {}, os.getcwd()))
        try:
            return int(json.loads(stdout.splitlines()[-1]))
        except (ValueError, IndexError, TypeError) as error:
            reason = ssh.last_line(stderr) or ending(status)
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
