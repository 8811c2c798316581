"""Watches over servers and program: what fails, what is ended, what starts anew."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TextIO

from replicator.launch import commands, keeper, local, output
from replicator.launch.flags import Job
from replicator.launch.hosts import LaunchError
from replicator.launch.output import Output
from replicator.launch.processes import Process, ending, exit_status
from replicator.launch.servers import Servers
from replicator.launch.shared import Shared
from replicator.launch.signals import Signals

# Seconds that the program has to say what a server's death means; at most so large a
# part of a heartbeat, within which the host is to be named.
_LAST_WORDS, _LAST_WORDS_PART = 1.0, 0.2
_CAUSES = 0.5  # seconds in which a server's death may become known after that
_OVER = 5.0  # seconds in addition to all grace times, after which nobody waits


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one attempt ended.

    Attributes:
        status: The exit status.
        final: Whether it is not to be tried again: it went well, or was called off.
        text: What failed, for people.
    """

    status: int
    final: bool = False
    text: str = ""


async def launch(job: Job) -> int:
    """Runs a job.

    Returns:
        The exit status: that of the program, or of the first that failed, and 128 + the
        signal where one killed it.

    Raises:
        LaunchError: It cannot be started.
    """
    keeper.adopt_orphans()  # of keepers that somebody kills
    out = Output([host.name for host in job.hosts], job.output_dir)
    signals = Signals()
    with contextlib.closing(out), signals.caught():
        restarts = 0
        while True:
            attempt = Attempt(job, out, signals, restarts)
            outcome = await attempt.run()
            restarts = attempt.restarts
            if outcome.text:
                out.say(outcome.text)
            if outcome.final or restarts >= job.max_restarts:
                return outcome.status
            restarts += 1
            out.say(f"starting anew, {restarts} of {job.max_restarts}")


class Attempt:
    """One life of all servers and the program.

    Args:
        job: What is launched.
        out: Where output goes.
        signals: What calls it off.
        restarts: How many lives there were before.

    Attributes:
        restarts: That, and how many servers were started again alone.
    """

    def __init__(self, job: Job, out: Output, signals: Signals, restarts: int) -> None:
        self._job, self._out, self._signals = job, out, signals
        self.restarts = self._before = restarts
        self._starting: dict[asyncio.Task[None], Process] = {}
        self._program: Process | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._at_once = False  # whether whoever waits has lost patience

    async def run(self) -> Outcome:
        """Starts all, waits for the first that ends, and ends the others."""
        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory("-replicator"))
            self._shared = Shared(folder)
            servers = Servers(self._job, self._out, stack, self._shared)
            try:
                outcome = await self._run(servers)
            finally:
                await self._end(servers)
        if self._signals.first is None:
            return outcome
        if self._program and self._program.status.done():  # it may have ended well
            return Outcome(exit_status(self._program.status.result()), final=True)
        return Outcome(128 + self._signals.first, final=True)

    async def _run(self, servers: Servers) -> Outcome:
        try:
            await self._until_signal(servers.start(retry=self._before > 0))
        except LaunchError as error:
            if self._before == 0:
                raise
            return Outcome(error.status, text=str(error))
        if self._signals.first is not None:
            return Outcome(1)  # of no matter: it is called off
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
        """Waits for the first that ends, but for servers that are started again.

        Returns:
            How it failed, where a server was not started again.
        """
        assert self._program
        while True:
            starting = {process.name for process in self._starting.values()}
            alone = [p for p in servers.processes if p.name not in starting]
            ended = [process for process in alone if process.status.done()]
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
        """Whether the program goes on after a server ended, which is seen to here."""
        if not (self._shared.copes and servers.can_restart):
            return False
        text = f"{process.name}: its server has ended: "
        text += ending(process.status.result())
        if self.restarts < self._job.max_restarts:
            self.restarts += 1
            count = f"{self.restarts} of {self._job.max_restarts}"
            self._out.say(f"{text}; starting it again, {count}")
            servers.processes.remove(process)
            self._starting[asyncio.create_task(servers.restart(process))] = process
        elif self._spare(servers):
            self._out.say(text)
            self._leave_out(servers, process)
        else:
            return False
        return True

    def _spare(self, servers: Servers) -> bool:
        least = self._job.min_nodes
        return least is not None and servers.count > least

    def _leave_out(self, servers: Servers, process: Process) -> None:
        servers.leave_out(process)
        hosts = f"{servers.count} of {len(self._job.hosts)} hosts"
        self._out.say(f"going on with {hosts}, without {process.name}")

    def _outcome(self, servers: Servers) -> Outcome:
        """Returns what has failed first; a server's death has the program fail."""
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
            return Outcome(1)  # of no matter: it is called off
        text = f"the program has ended: {ending(program.result())}"
        return Outcome(exit_status(program.result()), text=text)

    async def _first(
        self, waited: Sequence[asyncio.Future[Any]], limit: float | None = None
    ) -> None:
        """Waits for the first of several, or for a signal."""
        if self._signals.first is None:
            await asyncio.wait(
                [*waited, self._signals.next()],
                timeout=limit,
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def _until_signal(self, waited: Coroutine[Any, Any, None]) -> None:
        """Runs something, and cancels it where a signal comes first."""
        task = asyncio.create_task(waited)
        await self._first([task])
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif self._signals.first is None:
            task.result()

    async def _start_program(self, cluster: str) -> Process:
        """Starts the user's program, with the launcher's own input and output."""
        capture = self._job.output_dir is not None
        with _stdin() as stdin:
            command = commands.program(
                self._job, cluster, self._before, stdin, os.getcwd()
            )
            process = await local.start("program", command, capture)
        for reader, stream in zip(
            process.outputs, (sys.stdout, sys.stderr), strict=True
        ):
            if reader:
                pumped = output.pump(reader, self._taker(stream))
                self._pumps.append(asyncio.create_task(pumped))
        return process

    def _taker(self, stream: TextIO) -> Callable[[bytes], None]:
        return lambda data: self._out.raw("program", data, stream)

    async def _end(self, servers: Servers) -> None:
        """Ends the program, and then the servers, which it may need to the last."""
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        interrupted = self._signals.first == signal.SIGINT
        if self._program:
            await self._end_these(
                [self._program], signal.SIGINT if interrupted else signal.SIGTERM
            )
        await self._end_these(servers.processes, signal.SIGTERM)
        for pid in keeper.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=1)
        await servers.finish()
        for process in (
            *servers.processes,
            *([self._program] if self._program else []),
        ):
            process.abandon()

    async def _end_these(self, processes: Sequence[Process], number: int) -> None:
        """Ends some, and kills them when another signal comes."""
        if self._at_once:
            number = signal.SIGKILL
        limit = 3 * self._job.grace + _OVER
        ended = asyncio.gather(*(process.end(number, limit) for process in processes))
        while not ended.done():
            signalled = self._signals.next()
            either: list[asyncio.Future[Any]] = [ended, signalled]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                self._at_once = True
                for process in processes:
                    process.send(f"end {int(signal.SIGKILL)}")


@contextlib.contextmanager
def _stdin() -> Iterator[str | int]:
    """Yields the program's standard input, as a Command's.

    It is the launcher's, but for a terminal: a terminal belongs to one session, and the
    program has one of its own.
    """
    try:
        terminal = os.isatty(0)
        copied = os.dup(0)
    except OSError:  # it is closed
        yield "null"
        return
    try:
        yield "null" if terminal else copied
    finally:
        os.close(copied)
