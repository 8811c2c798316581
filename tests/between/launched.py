# SPDX-License-Identifier: Apache-2.0
"""Programs that the launcher runs on several hosts, and the output of their lives.

A life begins with a line "begun STEP" of every host; each further line begins with a
word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.cluster import servers
from tests.launch.said import Said
from tests.launch.stub import MARK, Place

HEARTBEAT = 5.0  # seconds, by default
_LIFE = 180.0  # maximum seconds on a busy machine


@dataclasses.dataclass
class Life:
    """The output of one life of a program.

    Attributes:
        begun: The number of completed steps at its beginning, by host.
        losses: By host and step.
        fault: The time of the fault, if there was one.
        named: When each program reported which hosts.
    """

    begun: list[int] = dataclasses.field(default_factory=list)
    losses: dict[tuple[str, int], str] = dataclasses.field(default_factory=dict)
    fault: float | None = None
    named: list[tuple[float, list[str]]] = dataclasses.field(default_factory=list)


def say(*words: object) -> None:
    """Writes a line atomically and immediately, in any thread."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def lives(said: Said, hosts: int = 2) -> list[Life]:
    """Parses the output of each life.

    Args:
        said: The launcher's standard output.
        hosts: The number of hosts.
    """
    result: list[Life] = []
    for _, line in said.lines:
        match = re.fullmatch(r"\[(\S+)\] +(begun|loss|fault|named) (.*)\n", line)
        if match is None:
            continue
        host, word, rest = match.groups()
        words = rest.split()
        if word == "begun" and (not result or len(result[-1].begun) == hosts):
            result.append(Life())
        life = result[-1]
        if word == "begun":
            life.begun.append(int(rest))
        elif word == "loss":
            life.losses[host, int(words[0])] = words[1]
        elif word == "fault":
            life.fault = float(rest)
        else:
            life.named.append((float(words[0]), words[1:]))
    return result


def flags(restarts: int, *more: str, heartbeat: float = HEARTBEAT) -> list[str]:
    """Returns the launcher's flags."""
    arguments = [f"--heartbeat={heartbeat:g}", f"--max-restarts={restarts}"]
    return ["--mode=between", *arguments, *more]


@contextlib.contextmanager
def started(
    place: Place, words: Sequence[str], module: str, *arguments: object
) -> Iterator[tuple[subprocess.Popen[str], Said, Said]]:
    """Starts the launcher; yields it, and its output.

    Args:
        place: The place to launch from.
        words: Its flags.
        module: The module to run.
        *arguments: The module's arguments.
    """
    program = [*words, "-m", module, *map(str, arguments)]
    with subprocess.Popen(
        [*place.prefix, sys.executable, "-m", "replicator.launch", *program],
        cwd=servers.ROOT,
        env=servers.environment(HOME=place.env["HOME"], **{MARK: place.mark}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            yield launcher, Said(launcher.stdout), Said(launcher.stderr)
        finally:
            launcher.kill()


def finish(
    place: Place,
    launcher: subprocess.Popen[str],
    said: tuple[Said, Said],
    restarts: int = 0,
) -> None:
    """Waits for a successful end without leftovers, and reads all output."""
    stdout, stderr = said
    status = launcher.wait(_LIFE * (restarts + 1))
    stdout.finish()
    stderr.finish()
    assert status == 0, stderr.text[-6000:]
    place.expect_nothing_left()


def run(
    place: Place,
    module: str,
    *arguments: object,
    restarts: int = 0,
    heartbeat: float = HEARTBEAT,
    shape: Sequence[str] = ("--nnodes=2",),
) -> tuple[Said, Said]:
    """Runs a module on several hosts, which are this one; returns the output.

    Args:
        place: The place to launch from.
        module: The program.
        *arguments: The module's arguments.
        restarts: The maximum number of restarts of all hosts.
        heartbeat: Seconds that a host may be silent.
        shape: The number of hosts, and of replicas on each.
    """
    words = flags(restarts, *shape, heartbeat=heartbeat)
    with started(place, words, module, *arguments) as (launcher, *streams):
        finish(place, launcher, (streams[0], streams[1]), restarts)
    return streams[0], streams[1]
