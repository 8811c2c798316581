# SPDX-License-Identifier: Apache-2.0
"""Between-graph mode: every host runs the program, and no server."""

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

# What ends a program by no fault of its own: its host is lost, or somebody kills it, as
# its keeper does if it is silent.
_CAUSES = (LOST, 128 + signal.SIGKILL)
# Seconds in which that may become known after another has failed because of it, and the
# part of a heartbeat, if that is longer: programs may find a silent one sooner.
_WAIT, _WAIT_PART = 0.5, 0.2


class Between(Attempt):
    """One life of the programs of all hosts."""

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
        self._running = programs = Programs(self._job, self._machines, self._before)
        if ended := await self._begin(programs.start(retry=self._before > 0)):
            return ended
        await self._first_failure(programs)
        if not programs.failed:  # all have ended well, or a signal has come
            return Outcome(0, final=True)
        cause = await self._cause(programs)
        await self._machines.finish(cause)  # it may say that its port is taken
        status = cause.status.result()
        return Outcome(
            exit_status(status),
            text=f"{cause.name}: the program has ended: {ending(status)}",
            port=programs.port_taken,
        )

    async def _first_failure(self, programs: Programs) -> None:
        """Waits for it, or until all have ended, or for a signal."""
        while not programs.failed and self._signals.first is None:
            if not programs.left:
                return
            await self._first(programs.left)

    async def _cause(self, programs: Programs) -> Process:
        """Returns what has failed first; where one is lost, the others fail, too."""
        clock = asyncio.get_running_loop().time
        until = clock() + max(_WAIT, _WAIT_PART * self._job.heartbeat)
        while True:
            for process in programs.failed:
                if process.status.result() in _CAUSES:
                    return process
            left = until - clock()
            if not programs.left or left <= 0 or self._signals.first is not None:
                return programs.failed[0]
            await self._first(programs.left, left)
