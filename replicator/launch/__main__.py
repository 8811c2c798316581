# SPDX-License-Identifier: Apache-2.0
"""Starts servers on all hosts and a program that uses them, or a program per host.

`python -m replicator.launch train.py` does the former, --mode=between the latter.
`python -m replicator.launch --help` lists the flags.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence

from replicator.launch import flags, hosts, keeper
from replicator.launch.asynchronous import Asynchronous
from replicator.launch.attempt import Attempt
from replicator.launch.between import Between
from replicator.launch.flags import ASYNC, BETWEEN, IN_GRAPH, Job
from replicator.launch.in_graph import InGraph
from replicator.launch.output import Output
from replicator.launch.signals import Signals

_MODES: dict[str, type[Attempt]] = {
    IN_GRAPH: InGraph,
    BETWEEN: Between,
    ASYNC: Asynchronous,
}
_PORTS = 3  # attempts at finding ports that are still free when programs use them


async def launch(job: Job) -> int:
    """Runs a job.

    Returns:
        The exit status: that of the program, or of the first that failed; 128 + the
        signal if a signal killed it.

    Raises:
        LaunchError: The job cannot be started.
    """
    keeper.adopt_orphans()  # the descendants of keepers that are killed
    programs = ["program"] if job.mode == IN_GRAPH else []
    out = Output([host.name for host in job.hosts], job.output_dir, programs)
    signals = Signals()
    with contextlib.closing(out), signals.caught():
        restarts, port_failures = 0, 0
        while True:
            attempt = _MODES[job.mode](job, out, signals, restarts)
            outcome = await attempt.run()
            restarts = attempt.restarts
            port_failures = port_failures + 1 if outcome.port else 0
            if 0 < port_failures < _PORTS:
                out.say("a port was taken: restarting all on other ports")
                continue
            if outcome.final or restarts >= job.max_restarts:
                return outcome.status
            restarts += 1
            out.say(f"restarting all, {restarts} of {job.max_restarts}")


def main(argv: Sequence[str]) -> int:
    """Runs the job that the arguments describe; returns the exit status."""
    try:
        job = flags.parse(argv, os.environ, hosts.own_names())
        return asyncio.run(launch(job))
    except hosts.LaunchError as error:
        text = " ".join(str(error).split())
        print(f"replicator.launch: {text}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
