# SPDX-License-Identifier: Apache-2.0
"""The commands to run and their environment: the contract with serve and connect.

Pure.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from replicator.launch.flags import Job
from replicator.launch.hosts import JobHost

CLUSTER = "REPLICATOR_CLUSTER"  # where `replicator.connect` reads the description
RESTARTS = "REPLICATOR_RESTARTS"  # how often the launcher has restarted everything
_ANY_PORT = 0
_PORT_IN_USE = b"Could not start gRPC server"  # TensorFlow's message for a port in use
# The fraction of a heartbeat after which a stopped server is killed: the keeper checks
# at intervals, and the program must learn of it within the heartbeat.
_STOPPED = 0.7
_ANNOUNCES = b'{"replicator-serve"'
_WARNINGS = "1"  # the log level of TensorFlow's servers; "0" includes information


@dataclasses.dataclass(frozen=True)
class Command:
    """A command for a keeper; see keeper.Keeper.

    Attributes:
        argv: The program and its arguments.
        env: Variables to add to those of the host.
        cwd: The working directory; used if it exists on the host.
        stdin: "null", "pipe", which closes when the keeper ends, or a file descriptor.
        grace: Seconds between a signal and the next, when ending the command.
        stopped: Seconds for which the command may be stopped before it is killed.
        remove: A folder to remove once the command has ended.
        announce: Whether the keeper reports the end of the command while it still ends
            the descendants; see processes.Process.
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
    """The facts that a server announces.

    Attributes:
        address: The address at which it listens, "host:port".
        gpus: The number of its GPUs, if known.
        answers: Who can connect to it, in words.
    """

    address: str
    gpus: int | None
    answers: str = ""


def server(
    job: Job,
    host: JobHost,
    listen: str,
    python: str,
    cwd: str,
    sources: Sequence[str] = (),
) -> Command:
    """Returns the command that runs the server of a host.

    Args:
        job: The job to launch.
        host: The host.
        listen: The address or name by which the others reach the server, "NAME:PORT";
            port 0 is any free one.
        python: The interpreter.
        cwd: The working directory.
        sources: The addresses from which the others connect, if known.
    """
    name, _, port = listen.rpartition(":")
    flags = [f"--port={port}", f"--host={name}", f"--cpus={host.slots}"]
    # Behind a tunnel nobody else reaches the server, but the server cannot know that.
    if job.insecure or job.tunnel:
        flags.append("--insecure")
    if sources:
        flags.append(f"--peers={','.join(sources)}")
    quiet = {} if job.verbose else {"TF_CPP_MIN_LOG_LEVEL": _WARNINGS}
    return Command(
        (python, "-m", "replicator.serve", *flags, "--watch=stdin"),
        {"PYTHONUNBUFFERED": "1", **quiet, **job.env},
        cwd,
        "pipe",
        job.grace,
        _STOPPED * job.heartbeat,
    )


def any_port(address: str) -> str:
    """Returns "ADDRESS:0", which stands for any free port; brackets IPv6 addresses."""
    return with_port(address, _ANY_PORT)


def with_port(address: str, port: int) -> str:
    """Returns "ADDRESS:PORT"; brackets IPv6 addresses."""
    bare = address.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def program(
    job: Job, cluster: str, restarts: int, stdin: str | int, cwd: str
) -> Command:
    """Returns the command that runs the user's program.

    Args:
        job: The job to launch.
        cluster: The description of the cluster.
        restarts: The number of earlier restarts.
        stdin: The program's standard input; see Command.
        cwd: The working directory.
    """
    env = {CLUSTER: cluster, RESTARTS: str(restarts)}
    if job.output_dir is not None:  # its output is a pipe then
        env["PYTHONUNBUFFERED"] = "1"
    argv = (sys.executable, *job.program)
    return Command(argv, env, cwd, stdin, job.grace)


def part(job: Job, cluster: str, restarts: int, python: str, cwd: str) -> Command:
    """Returns the command for one host in modes where all run the user's program.

    Args:
        job: The job to launch.
        cluster: The description of the cluster, with the host's number.
        restarts: The number of earlier restarts.
        python: The interpreter.
        cwd: The working directory.
    """
    variables = {CLUSTER: cluster, RESTARTS: str(restarts)}
    return Command(
        (python, *job.program),
        {"PYTHONUNBUFFERED": "1", **job.env, **variables},
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
    sources: Sequence[str] = (),
) -> str:
    """Returns the value of REPLICATOR_CLUSTER for in-graph mode, as JSON.

    Args:
        job: The job to launch.
        client: The program's own address; with port 0 it chooses a port.
        servers: The servers of the job's hosts; None leaves a host out.
        file: The path of a file that holds the current version of this text.
        sources: The addresses from which the hosts connect, if known.
    """
    facts = {**_facts(job, servers, sources), "client": client}
    if file is not None:
        facts["file"] = file
    return json.dumps(facts)


def describe_part(
    job: Job, addresses: Sequence[str], task: int, sources: Sequence[str] = ()
) -> str:
    """Returns the value of REPLICATOR_CLUSTER for between-graph mode.

    Args:
        job: The job to launch.
        addresses: The address at which each program's TensorFlow server listens; their
            GPUs are not known in advance.
        task: The number of the host.
        sources: The addresses from which the programs connect, if known.
    """
    listening = [Serving(address, None) for address in addresses]
    return json.dumps({**_facts(job, listening, sources), "task": task})


def describe_program(
    job: Job, servers: Sequence[Serving], task: int, sources: Sequence[str] = ()
) -> str:
    """Returns the value of REPLICATOR_CLUSTER for asynchronous mode.

    Args:
        job: The job to launch.
        servers: The servers that hold variables, on the first hosts.
        task: The number of the host whose program this is for.
        sources: The addresses from which the hosts connect, if known.
    """
    facts = _facts(with_servers(job), servers, sources)
    programs = [{"name": host.name, "cpus": host.slots} for host in job.hosts]
    return json.dumps({**facts, "task": task, "programs": programs})


def with_servers(job: Job) -> Job:
    """Returns the job with only the hosts that hold variables in asynchronous mode."""
    first = job.hosts[: job.servers]
    hosts = tuple(dataclasses.replace(host, slots=1) for host in first)
    return dataclasses.replace(job, hosts=hosts)


def _facts(
    job: Job, servers: Sequence[Serving | None], sources: Sequence[str]
) -> dict[str, Any]:
    hosts = [
        {
            "name": host.name,
            "address": server_facts.address,
            "cpus": host.slots,
            "gpus": server_facts.gpus,
        }
        for host, server_facts in zip(job.hosts, servers, strict=True)
        if server_facts is not None
    ]
    return {
        "version": 1,
        "source": job.source,
        "heartbeat": job.heartbeat,
        "hosts": hosts,
        **({"sources": list(sources)} if sources else {}),
    }


def is_port_in_use(line: bytes, address: str) -> bool:
    """Whether a program reports that it cannot listen at its address.

    `replicator.connect` then raises an error that names the address and quotes
    TensorFlow.

    Example:
        >>> from replicator.launch import commands
        >>> text = b"host 0 (a:1) could not join: Could not start gRPC server."
        >>> commands.is_port_in_use(text, "a:1"), commands.is_port_in_use(text, "a:2")
        (True, False)
    """
    return _PORT_IN_USE in line and f"({address})".encode() in line


def answers(names: Sequence[str], servers: Sequence[Serving]) -> str:
    """Returns the line that says who can connect to the servers of a job.

    Args:
        names: The names of their hosts.
        servers: The facts that they announced.

    Example:
        >>> from replicator.launch.commands import Serving, answers
        >>> one = Serving("10.0.0.1:1", 0, "whoever reaches eth0")
        >>> answers(["a", "b"], [one, one])
        'servers answer whoever reaches eth0'
    """
    hosts: dict[str, list[str]] = {}
    for name, server_facts in zip(names, servers, strict=True):
        hosts.setdefault(server_facts.answers, []).append(name)
    if len(hosts) == 1:
        return f"servers answer {next(iter(hosts))}"
    parts = (f"{text} ({', '.join(host_names)})" for text, host_names in hosts.items())
    return f"servers answer {'; '.join(parts)}"


def serving(line: bytes) -> Serving | None:
    """Parses the line by which a server announces itself; None for other lines."""
    try:
        # The shell's own files may have begun the line.
        facts: Any = json.loads(line[max(line.find(_ANNOUNCES), 0) :])
        if facts["replicator-serve"] != 1:
            return None
        answers = str(facts.get("answers", ""))
        return Serving(str(facts["address"]), int(facts["gpus"]), answers)
    except (ValueError, KeyError, TypeError):
        return None
