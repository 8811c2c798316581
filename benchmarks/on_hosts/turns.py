# SPDX-License-Identifier: Apache-2.0
"""Programs with a process on each host, which take steps when it is their turn.

A process is told what to run, and how often, by lines of its standard input, and
answers each with a line. It ends when its standard input closes. Nothing here needs a
framework: torch's processes use it, too.
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

_LIMIT = 600  # seconds for a line of a process; the first turn builds what it runs
_LINES = 20  # of what a process has said before it failed


def answer(runs: Mapping[str, Callable[[], timing.Run]]) -> None:
    """Takes turns until there are no more; called in a process of a program.

    Args:
        runs: By name, what makes what runs steps. It is made in its first turn.
    """
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    made: dict[str, timing.Run] = {}
    for line in sys.stdin:
        name, count = json.loads(line)
        if name not in made:
            made[name] = runs[name]()
        print(json.dumps(made[name](count)), file=lines, flush=True)


class Program:
    """The processes of one program, in the order of their hosts; use `running`."""

    def __init__(self, title: str, processes: Sequence[Any], errors: Any) -> None:
        self._title, self._processes, self._errors = title, processes, errors

    def run(self, name: str) -> timing.Run:
        """Returns what runs steps of one of the things that the processes can run.

        Their times are those of the first process, their losses the mean of all.
        """

        def run(count: int) -> list[timing.Sample]:
            return self._run(name, count)

        return run

    def _run(self, name: str, count: int) -> list[timing.Sample]:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # `said` says why
                process.stdin.write(f"{json.dumps([name, count])}\n".encode())
        return [
            timing.Sample(step[0][0], statistics.fmean(loss for _, loss in step))
            for step in zip(*self.said(), strict=True)
        ]

    def said(self) -> list[Any]:
        """Returns what the next line of each says, as JSON; or ends this process."""
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
    """Runs a program in this block.

    Args:
        title: For messages.
        hosts: Where the processes run.
        commands: The command of each.
        environment: Variables that are added to this process's.
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
    """Ends a process: in order where it can, as it has nothing else to do."""
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
