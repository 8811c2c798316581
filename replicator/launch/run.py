# SPDX-License-Identifier: Apache-2.0
"""Runs a job: what failed is started anew, as often as that may be."""

from __future__ import annotations

import contextlib

from replicator.launch import keeper
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
_PORTS = 3  # attempts to find ports that are still free when programs listen there


async def launch(job: Job) -> int:
    """Runs a job.

    Returns:
        The exit status: that of the program, or of the first that failed, and 128 + the
        signal where one killed it.

    Raises:
        LaunchError: It cannot be started.
    """
    keeper.adopt_orphans()  # of keepers that somebody kills
    programs = ["program"] if job.mode == IN_GRAPH else []
    out = Output([host.name for host in job.hosts], job.output_dir, programs)
    signals = Signals()
    with contextlib.closing(out), signals.caught():
        restarts, taken = 0, 0
        while True:
            attempt = _MODES[job.mode](job, out, signals, restarts)
            outcome = await attempt.run()
            restarts = attempt.restarts
            taken = taken + 1 if outcome.port else 0
            if 0 < taken < _PORTS:
                out.say("a port was taken: starting anew with others")
                continue
            if outcome.final or restarts >= job.max_restarts:
                return outcome.status
            restarts += 1
            out.say(f"starting anew, {restarts} of {job.max_restarts}")
