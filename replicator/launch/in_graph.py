# SPDX-License-Identifier: Apache-2.0
"""In-graph mode: a server on each host, and one program on this host that uses them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from replicator.launch import commands, local, output
from replicator.launch.attempt import Attempt, Outcome
from replicator.launch.flags import Job
from replicator.launch.folders import Folder
from replicator.launch.hosts import LaunchError
from replicator.launch.output import Output
from replicator.launch.processes import Process, ending, exit_status
from replicator.launch.servers import Servers
from replicator.launch.shared import Shared
from replicator.launch.signals import Signals

# Seconds for the program to report what the death of a server means; at most this
# fraction of a heartbeat, within which the host must be named.
_LAST_WORDS, _LAST_WORDS_PART = 1.0, 0.2
# Seconds after the program's failure for the death of a server to become known.
_CAUSES = 0.5
_FEWER = (
    "fewer hosts can continue from a checkpoint with repl.inputs only if one pipeline "
    "feeds all replicas, and not if an input_fn makes one for each"
)


class InGraph(Attempt):
    """One attempt at running all servers and the program."""

    def __init__(self, job: Job, out: Output, signals: Signals, restarts: int) -> None:
        super().__init__(job, out, signals, restarts)
        self._starting: dict[asyncio.Task[None], Process] = {}
        self._program: Process | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._serving: Servers | None = None

    @property
    def _programs(self) -> Sequence[Process]:
        return [self._program] if self._program else []

    @property
    def _servers(self) -> Sequence[Process]:
        return self._serving.processes if self._serving else ()

    @property
    def _count(self) -> int:
        return 1

    async def _live(self, stack: contextlib.AsyncExitStack) -> Outcome:
        folder = stack.enter_context(Folder())
        self._shared = Shared(folder)
        servers = Servers(self._job, self._machines, self._shared)
        self._serving = servers
        min_nodes = self._job.min_nodes
        if self._first_restart == 0 and min_nodes and min_nodes < len(self._job.hosts):
            self._out.say(f"--min-nodes={min_nodes}: {_FEWER}")
        if outcome := await self._begin(servers.start(retry=self._first_restart > 0)):
            return outcome
        self._program = await self._start_program(servers.cluster)
        failed = await self._look_after(servers)
        if failed is not None and not self._program.status.done():
            return failed
        serving = [process.status for process in servers.processes]
        if any(status.done() for status in serving):
            limit = min(_LAST_WORDS, _LAST_WORDS_PART * self._job.heartbeat)
            await self._first([self._program.status], limit)
        elif self._program.status.done() and self._program.status.result() != 0:
            await self._first(serving, _CAUSES)
        return self._outcome(servers)

    async def _look_after(self, servers: Servers) -> Outcome | None:
        """Restarts or leaves out lost servers while the program can go on.

        Returns:
            The failure, if a server could not be restarted; None otherwise.
        """
        assert self._program
        while True:
            starting = {process.name for process in self._starting.values()}
            running = [p for p in servers.processes if p.name not in starting]
            ended = [process for process in running if process.status.done()]
            if self._program.status.done() or self._signals.first is not None:
                return None
            for process in ended:
                if not self._goes_on(servers, process):
                    return None
            for task in [task for task in self._starting if task.done()]:
                process = self._starting.pop(task)
                error = task.exception()
                if error is None:
                    self._out.say(f"{process.name}: its server is up again")
                elif isinstance(error, LaunchError) and self._spare(servers):
                    self._out.say(str(error))
                    self._leave_out(servers, process)
                elif isinstance(error, LaunchError):
                    return Outcome(error.status, text=str(error))
                else:
                    raise error
            starting = {process.name for process in self._starting.values()}
            serving = [p.status for p in servers.processes if p.name not in starting]
            await self._first([self._program.status, *serving, *self._starting])

    def _goes_on(self, servers: Servers, process: Process) -> bool:
        """Restarts or leaves out a server that has ended, if the program can cope.

        Returns:
            Whether the program goes on.
        """
        if not (self._shared.copes and servers.can_restart):
            return False
        text = f"{process.name}: its server has ended: "
        text += ending(process.status.result())
        if self.restarts < self._job.max_restarts:
            self.restarts += 1
            count = f"{self.restarts} of {self._job.max_restarts}"
            self._out.say(f"{text}; restarting it, {count}")
            servers.processes.remove(process)
            self._starting[asyncio.create_task(servers.restart(process))] = process
        elif self._spare(servers):
            self._out.say(text)
            self._leave_out(servers, process)
        else:
            return False
        return True

    def _spare(self, servers: Servers) -> bool:
        min_nodes = self._job.min_nodes
        return min_nodes is not None and servers.count > min_nodes

    def _leave_out(self, servers: Servers, process: Process) -> None:
        servers.leave_out(process)
        hosts = f"{servers.count} of {len(self._job.hosts)} hosts"
        self._out.say(f"continuing with {hosts}, without {process.name}")

    def _outcome(self, servers: Servers) -> Outcome:
        """Returns the first failure; the death of a server makes the program fail."""
        assert self._program
        program = self._program.status
        if program.done() and program.result() == 0:
            return Outcome(0, final=True)
        for process in servers.processes:
            if process.status.done():
                status = process.status.result()
                text = f"{process.name}: its server has ended: {ending(status)}"
                return Outcome(exit_status(status) or 1, text=text)
        if not program.done():
            return Outcome(1)  # unused: a signal has ended the attempt
        text = f"the program has ended: {ending(program.result())}"
        return Outcome(exit_status(program.result()), text=text)

    async def _start_program(self, cluster: str) -> Process:
        """Starts the user's program with the launcher's own input and output."""
        capture = self._job.output_dir is not None
        with _stdin() as stdin:
            command = commands.program(
                self._job, cluster, self._first_restart, stdin, os.getcwd()
            )
            process = await local.start("program", command, capture)
        for reader, stream in zip(
            process.outputs, (sys.stdout, sys.stderr), strict=True
        ):
            if reader:
                pump = output.pump(reader, self._taker(stream))
                self._pumps.append(asyncio.create_task(pump))
        return process

    def _taker(self, stream: TextIO) -> Callable[[bytes], None]:
        return lambda data: self._out.raw("program", data, stream)

    async def _end(self) -> None:
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await super()._end()

    async def _drain(self) -> None:
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=1)
        await super()._drain()


@contextlib.contextmanager
def _stdin() -> Iterator[str | int]:
    """Yields the program's standard input, for a Command.

    It is the launcher's, unless that is a terminal: a terminal belongs to one session,
    and the program has its own.
    """
    try:
        is_terminal = os.isatty(0)
        duplicate = os.dup(0)
    except OSError:  # standard input is closed
        yield "null"
        return
    try:
        yield "null" if is_terminal else duplicate
    finally:
        os.close(duplicate)
