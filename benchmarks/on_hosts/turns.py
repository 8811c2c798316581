# SPDX-License-Identifier: Apache-2.0
"""Programs with a process on each host, which run steps when it is their turn.

A process reads lines of its standard input that name what to run, and how often, and
answers each with a line. It ends when its standard input closes. Nothing here needs a
framework, so torch's processes use it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NoReturn

from benchmarks import cli, timing
from benchmarks.on_hosts.namespaces import Host

_LIMIT = 600  # seconds per line of a process; the first turn also builds the run
_LINES = 20  # of a process's output, shown when it fails


def answer(runs: Mapping[str, Callable[[], timing.Run]]) -> None:
    """Takes turns until standard input closes; called in a process of a program.

    Args:
        runs: By name, a factory of a run, which is called in the run's first turn.
    """
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is no answer
    cached_runs: dict[str, timing.Run] = {}
    for line in sys.stdin:
        name, count = json.loads(line)
        if name not in cached_runs:
            cached_runs[name] = runs[name]()
        print(json.dumps(cached_runs[name](count)), file=lines, flush=True)


class Program:
    """The processes of one program, in the order of their hosts; use `running`."""

    def __init__(self, title: str, processes: Sequence[Any], errors: Any) -> None:
        self._title, self._processes, self._errors = title, processes, errors

    def run(self, name: str) -> timing.Run:
        """Returns a run of the named contender.

        Its times are those of the first process, its losses the mean over all.
        """

        def run(count: int) -> list[timing.Sample]:
            return self._run(name, count)

        return run

    def _run(self, name: str, count: int) -> list[timing.Sample]:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # `said` reports the reason
                process.stdin.write(f"{json.dumps([name, count])}\n".encode())
        return [
            timing.Sample(step[0][0], statistics.fmean(loss for _, loss in step))
            for step in zip(*self.said(), strict=True)
        ]

    def said(self) -> list[Any]:
        """Returns the next line of each process, from JSON; exits on failure."""
        return [json.loads(self._read(process)) for process in self._processes]

    def _read(self, process: Any) -> bytes:
        if not select.select([process.stdout], [], [], _LIMIT)[0]:
            self._fail(f"has said nothing for {_LIMIT} s")
        line = process.stdout.readline()
        if not line:
            self._fail(f"has ended with status {process.wait()}")
        return line

    def _fail(self, what: str) -> NoReturn:
        self._errors.seek(0)
        sys.stderr.writelines(self._errors.readlines()[-_LINES:])
        cli.fail(f"a process of {self._title} {what}")


@contextlib.contextmanager
def running(
    title: str,
    hosts: Sequence[Host],
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str] | None = None,
) -> Iterator[Program]:
    """Runs a program for the duration of the block.

    Args:
        title: The program's name in messages.
        hosts: The hosts of the processes.
        commands: The command of each.
        environment: Variables added to this process's environment.
    """
    with contextlib.ExitStack() as stack:
        errors: IO[str] = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes = []
        for host, command in zip(hosts, commands, strict=True):
            process = subprocess.Popen(
                host.command(*command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd=cli.REPOSITORY,
                env={**os.environ, **(environment or {})},
            )
            stack.callback(_end, process)
            processes.append(process)
        yield Program(title, processes, errors)


def _end(process: Any) -> None:
    """Ends a process, in order if possible: closed input makes it exit."""
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
