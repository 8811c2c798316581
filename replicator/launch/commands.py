# SPDX-License-Identifier: Apache-2.0
"""What is run, and with which variables: the contract with serve and connect. Pure."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from replicator.launch.flags import Job
from replicator.launch.hosts import Host

CLUSTER = "REPLICATOR_CLUSTER"  # where `replicator.connect` reads what there is
RESTARTS = "REPLICATOR_RESTARTS"  # how often the launcher has started all anew
_ANY_PORT = 0
_TAKEN = b"Could not start gRPC server"  # what TensorFlow says
# The part of a heartbeat after which a server that is stopped is killed: the keeper
# looks now and then, and the program is to know within the heartbeat.
_STOPPED = 0.7
_WARNINGS = "1"  # the least that TensorFlow's servers say; information is "0"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command for a keeper; see keeper.Keeper.

    Attributes:
        argv: The program and its arguments.
        env: Variables in addition to those of the host.
        cwd: The working directory, if it exists there.
        stdin: "null", "pipe", which closes when the keeper ends, or a file descriptor.
        grace: Seconds between a signal and the next, when it is ended.
        stopped: After how many seconds in which it is stopped it is killed.
        remove: A folder that is removed once it has ended.
        announce: Whether its keeper says that it has ended while what it has left
            behind is being ended; see processes.Process.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    stdin: str | int = "null"
    grace: float = 10.0
    stopped: float | None = None
    remove: str | None = None
    announce: bool = False


@dataclasses.dataclass(frozen=True)
class Serving:
    """What a server's line says.

    Attributes:
        address: Where it listens, "host:port".
        gpus: How many GPUs it has, if that is known.
    """

    address: str
    gpus: int | None


def server(job: Job, host: Host, listen: str, python: str, cwd: str) -> Command:
    """Returns the command that runs the server of a host.

    Args:
        job: What is launched.
        host: The host.
        listen: The address or name by which the others reach the server, "NAME:PORT";
            port 0 is any that is free.
        python: The interpreter.
        cwd: The working directory.
    """
    name, _, port = listen.rpartition(":")
    flags = [f"--port={port}", f"--host={name}", f"--cpus={host.slots}"]
    # Behind a tunnel nobody reaches the server, of which it cannot know.
    insecure = ["--insecure"] if job.insecure or job.tunnel else []
    quiet = {} if job.verbose else {"TF_CPP_MIN_LOG_LEVEL": _WARNINGS}
    return Command(
        (python, "-m", "replicator.serve", *flags, "--watch=stdin", *insecure),
        {"PYTHONUNBUFFERED": "1", **quiet, **job.env},
        cwd,
        "pipe",
        job.grace,
        _STOPPED * job.heartbeat,
    )


def any_port(address: str) -> str:
    """Returns an address with whatever port is free; IPv6 ones are in brackets."""
    return with_port(address, _ANY_PORT)


def with_port(address: str, port: int) -> str:
    """Returns "ADDRESS:PORT"; IPv6 addresses are in brackets."""
    bare = address.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def program(
    job: Job, cluster: str, restarts: int, stdin: str | int, cwd: str
) -> Command:
    """Returns the command that runs the user's program.

    Args:
        job: What is launched.
        cluster: The description of the cluster.
        restarts: How often all was started anew before.
        stdin: Its standard input, as a Command's.
        cwd: The working directory.
    """
    env = {CLUSTER: cluster, RESTARTS: str(restarts)}
    if job.output_dir is not None:  # which has it write to a pipe
        env["PYTHONUNBUFFERED"] = "1"
    argv = (sys.executable, *job.program)
    return Command(argv, env, cwd, stdin, job.grace)


def part(job: Job, cluster: str, restarts: int, python: str, cwd: str) -> Command:
    """Returns the command that runs the user's program on one of the hosts, as on all.

    Args:
        job: What is launched.
        cluster: The description of the cluster, with the host's number.
        restarts: How often all was started anew before.
        python: The interpreter.
        cwd: The working directory.
    """
    told = {CLUSTER: cluster, RESTARTS: str(restarts)}
    return Command(
        (python, *job.program),
        {"PYTHONUNBUFFERED": "1", **job.env, **told},
        cwd,
        grace=job.grace,
        stopped=_STOPPED * job.heartbeat,
        announce=True,
    )


def describe(
    job: Job,
    client: str,
    servers: Sequence[Serving | None],
    file: str | None = None,
) -> str:
    """Returns the value of REPLICATOR_CLUSTER, JSON.

    Args:
        job: What is launched.
        client: The program's own address; with port 0 it chooses one.
        servers: Those of the job's hosts; None: it is left out.
        file: Where to read this text again, as it is by then.
    """
    facts = {**_facts(job, servers), "client": client}
    if file is not None:
        facts["file"] = file
    return json.dumps(facts)


def describe_part(job: Job, addresses: Sequence[str], task: int) -> str:
    """Returns the value of REPLICATOR_CLUSTER where every host runs the program.

    Args:
        job: What is launched.
        addresses: Where TensorFlow's server of each program listens. What GPUs it will
            have, nobody knows before.
        task: The number of the host.
    """
    listening = [Serving(address, None) for address in addresses]
    return json.dumps({**_facts(job, listening), "task": task})


def describe_program(job: Job, servers: Sequence[Serving], task: int) -> str:
    """Returns the value of REPLICATOR_CLUSTER in asynchronous mode.

    Args:
        job: What is launched.
        servers: Those that hold variables, of the first hosts.
        task: The number of the host whose program it is for.
    """
    facts = _facts(with_servers(job), servers)
    programs = [{"name": host.name, "cpus": host.slots} for host in job.hosts]
    return json.dumps({**facts, "task": task, "programs": programs})


def with_servers(job: Job) -> Job:
    """Returns the hosts of a job that hold variables in asynchronous mode."""
    holding = job.hosts[: job.servers]
    one = tuple(dataclasses.replace(host, slots=1) for host in holding)
    return dataclasses.replace(job, hosts=one)


def _facts(job: Job, servers: Sequence[Serving | None]) -> dict[str, Any]:
    listed = [
        {"name": host.name, "address": up.address, "cpus": host.slots, "gpus": up.gpus}
        for host, up in zip(job.hosts, servers, strict=True)
        if up is not None
    ]
    return {
        "version": 1,
        "source": job.source,
        "heartbeat": job.heartbeat,
        "hosts": listed,
    }


def is_port_taken(line: bytes, address: str) -> bool:
    """Returns whether a program says that it cannot listen where it should.

    `replicator.connect` raises an error then, which names the address and has
    TensorFlow's words.

    Example:
        >>> from replicator.launch import commands
        >>> text = b"host 0 (a:1) could not join: Could not start gRPC server."
        >>> commands.is_port_taken(text, "a:1"), commands.is_port_taken(text, "a:2")
        (True, False)
    """
    return _TAKEN in line and f"({address})".encode() in line


def serving(line: bytes) -> Serving | None:
    """Returns what a server says of itself; None if the line is another."""
    try:
        facts: Any = json.loads(line)
        if facts["replicator-serve"] != 1:
            return None
        return Serving(str(facts["address"]), int(facts["gpus"]))
    except (ValueError, KeyError, TypeError):
        return None
