# SPDX-License-Identifier: Apache-2.0
"""Between-graph mode: every host runs the program, and there are no servers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence

from replicator.launch.attempt import Attempt, Outcome
from replicator.launch.flags import Job
from replicator.launch.output import Output
from replicator.launch.processes import LOST, Process, ending, exit_status
from replicator.launch.programs import Programs
from replicator.launch.signals import Signals

# The statuses of programs that fail first and make others fail: the host is lost, or
# the program was killed, as by its keeper if it is silent.
_CAUSES = (LOST, 128 + signal.SIGKILL)
# Seconds, or this fraction of a heartbeat if longer, for such a status to arrive after
# another program has failed: programs may notice a silent one before the launcher does.
# That may take a whole heartbeat, for which to wait if a program
# reports a lost host.
_WAIT, _WAIT_PART = 0.5, 0.2


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
