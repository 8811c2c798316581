# SPDX-License-Identifier: Apache-2.0
"""Programs that the launcher runs on several hosts, and what each of their lives says.

A life begins with a line "begun STEP" of every host; further lines are of any word.
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

HEARTBEAT = 5.0  # seconds, unless a test says otherwise
_LIFE = 180.0  # seconds that one may take on a busy machine


@dataclasses.dataclass
class Life:
    """What one life of a program has said.

    Attributes:
        begun: How many steps were done when it began, by each host.
        losses: By host and step.
        fault: When the fault was, if there was one.
        named: When which hosts were named, by each program that was told.
    """

    begun: list[int] = dataclasses.field(default_factory=list)
    losses: dict[tuple[str, int], str] = dataclasses.field(default_factory=dict)
    fault: float | None = None
    named: list[tuple[float, list[str]]] = dataclasses.field(default_factory=list)


def say(*words: object) -> None:
    """Writes a line at once, whichever thread writes another."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def lives(said: Said, hosts: int = 2) -> list[Life]:
    """Returns what each life has said.

    Args:
        said: The launcher's standard output.
        hosts: How many there are.
    """
    found: list[Life] = []
    for _, line in said.lines:
        match = re.fullmatch(r"\[(\S+)\] +(begun|loss|fault|named) (.*)\n", line)
        if match is None:
            continue
        host, word, rest = match.groups()
        words = rest.split()
        if word == "begun" and (not found or len(found[-1].begun) == hosts):
            found.append(Life())
        life = found[-1]
        if word == "begun":
            life.begun.append(int(rest))
        elif word == "loss":
            life.losses[host, int(words[0])] = words[1]
        elif word == "fault":
            life.fault = float(rest)
        else:
            life.named.append((float(words[0]), words[1:]))
    return found


def flags(restarts: int, *more: str, heartbeat: float = HEARTBEAT) -> list[str]:
    """Returns the launcher's flags."""
    said = [f"--heartbeat={heartbeat:g}", f"--max-restarts={restarts}"]
    return ["--mode=between", *said, *more]


@contextlib.contextmanager
def started(
    place: Place, words: Sequence[str], module: str, *arguments: object
) -> Iterator[tuple[subprocess.Popen[str], Said, Said]]:
    """Starts the launcher; yields it, and what it writes.

    Args:
        place: Where.
        words: Its flags.
        module: What it runs.
        *arguments: Of that.
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
    """Waits until it has ended well, has been read to the end, and left nothing."""
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
    """Runs a module on several hosts, which are this one; returns what is written.

    Args:
        place: Where.
        module: The program.
        *arguments: Of that.
        restarts: How often all may be started anew.
        heartbeat: Seconds that a host may be silent.
        shape: How many hosts, and replicas of each.
    """
    words = flags(restarts, *shape, heartbeat=heartbeat)
    with started(place, words, module, *arguments) as (launcher, *said):
        finish(place, launcher, (said[0], said[1]), restarts)
    return said[0], said[1]
