# SPDX-License-Identifier: Apache-2.0
"""Parses the flags of `python -m replicator.launch`. Reads only the files they name.

As with torchrun, the launcher's own flags come before the script, and everything after
the script is passed to the program unchanged.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from replicator.launch import hostfile, hosts
from replicator.launch.hosts import JobHost, LaunchError

IN_GRAPH, BETWEEN, ASYNC = "in-graph", "between", "async"  # the modes
_USAGE = "python -m replicator.launch [FLAGS] train.py|-m MODULE [ARGUMENTS]"


@dataclasses.dataclass(frozen=True)
class Job:
    """What to launch, and how; the other attributes are the flags of these names."""

    hosts: tuple[JobHost, ...]
    source: str  # the flag that named the hosts, for messages of the program
    program: tuple[str, ...]  # the script, or "-m" and a module, and its arguments
    mode: str = IN_GRAPH
    servers: int = 1
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    python: str | None = None
    max_restarts: int = 0
    min_nodes: int | None = None
    start_timeout: float = 120.0
    grace: float = 10.0
    heartbeat: float = 10.0
    output_dir: str | None = None
    ssh_port: int | None = None
    identity: str | None = None
    sync: bool = False
    insecure: bool = False
    tunnel: bool = False
    verbose: bool = False


class _Parser(argparse.ArgumentParser):
    """Raises LaunchError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message} (see --help)")


def _number(kind: type, least: float, most: float) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:50]!r} is not a number from {least:g} to {most:g}"
            )
        return value

    return parse


_COUNT = _number(int, 1, hostfile.MOST_SLOTS)
_SECONDS = _number(float, 0.1, 86400)
_SWITCH = {"action": "store_true"}
# The arguments of argparse's `add_argument`, by flag.
_FLAGS: dict[str, dict[str, Any]] = {
    "hosts": {
        "metavar": "A,B:2",
        "help": "Hosts, each optionally with its number of replicas.",
    },
    "hostfile": {"metavar": "FILE", "help": "A file with a host on each line."},
    "nnodes": {
        "type": _COUNT,
        "metavar": "N",
        "help": "How many hosts to make of this one, or how many named ones to use.",
    },
    "nproc-per-node": {
        "type": _COUNT,
        "metavar": "N",
        "help": "CPU replicas on each host without a number of its own; default 1.",
    },
    "mode": {
        "choices": (IN_GRAPH, BETWEEN, ASYNC),
        "default": IN_GRAPH,
        "help": "in-graph: the program runs once, here, and the hosts run servers; "
        "between: every host runs the program, without servers; async: every host "
        "runs the program at its own speed, and the first ones serve the variables.",
    },
    "servers": {
        "type": _COUNT,
        "default": 1,
        "metavar": "N",
        "help": "With --mode=async: how many hosts hold variables; default 1.",
    },
    "python": {"metavar": "PATH", "help": "Python on other hosts; default this one's."},
    "env": {
        "action": "append",
        "metavar": "NAME[=VALUE]",
        "default": [],
        "help": "A variable for the hosts, by default with its value here; repeatable.",
    },
    "sync": {**_SWITCH, "help": "Copy the working directory to the other hosts first."},
    "max-restarts": {
        "type": _number(int, 0, 10**6),
        "default": 0,
        "metavar": "N",
        "help": "How many times to restart after a failure; default 0.",
    },
    "min-nodes": {
        "type": _COUNT,
        "metavar": "N",
        "help": "The fewest hosts with which a program of replicator.resilient "
        "continues; default all. If it saves repl.inputs, one pipeline has to feed all "
        "replicas.",
    },
    "start-timeout": {
        "type": _SECONDS,
        "default": 120.0,
        "metavar": "SECONDS",
        "help": "How long to wait until all hosts are ready; default 120.",
    },
    "grace": {
        "type": _SECONDS,
        "default": 10.0,
        "metavar": "SECONDS",
        "help": "Time from SIGTERM to SIGKILL when a job is ended; default 10.",
    },
    "heartbeat": {
        "type": _SECONDS,
        "default": 10.0,
        "metavar": "SECONDS",
        "help": "How long a host may be silent before it counts as lost; default 10.",
    },
    "output-dir": {
        "metavar": "DIR",
        "help": "Also write each host's output to a file of its own in DIR.",
    },
    "ssh-port": {
        "type": _number(int, 1, 65535),
        "metavar": "PORT",
        "help": "Default 22.",
    },
    "identity": {"metavar": "FILE", "help": "The private key for SSH."},
    "tunnel": {
        **_SWITCH,
        "help": "Send all traffic through SSH; no other machine or user reaches the "
        "servers.",
    },
    "insecure": {
        **_SWITCH,
        "help": "Let servers listen where others may reach them.",
    },
    "verbose": {**_SWITCH, "help": "Report each action."},
}
_WITHOUT_VALUE = {
    f"--{name}"
    for name, options in _FLAGS.items()
    if options.get("action") == "store_true"
}


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments into the launcher's own and the program's.

    Args:
        argv: All arguments, e.g. ["--nnodes", "2", "-m", "train", "--nnodes=7"].

    Returns:
        The launcher's arguments, and those from the script, or from -m, on.

    Example:
        >>> from replicator.launch import flags
        >>> flags.split(["--nnodes", "2", "-m", "train", "--nnodes=7"])
        (['--nnodes', '2'], ['-m', 'train', '--nnodes=7'])
    """
    position = 0
    while position < len(argv):
        argument = argv[position]
        if argument == "--":
            return list(argv[:position]), list(argv[position + 1 :])
        if argument == "-m" or not argument.startswith("-"):
            break
        has_no_value = "=" in argument or argument in {*_WITHOUT_VALUE, "-h", "--help"}
        position += 1 if has_no_value else 2
    return list(argv[:position]), list(argv[position:])


def parse(
    argv: Sequence[str], environment: Mapping[str, str], local_names: Collection[str]
) -> Job:
    """Parses the launcher's arguments.

    Args:
        argv: The arguments, without the launcher's name.
        environment: The launcher's environment variables.
        local_names: The names of this host.

    Raises:
        LaunchError: The arguments are invalid.
    """
    flags, program = split([_dashes(argument) for argument in argv])
    program = list(argv[len(argv) - len(program) :])
    values = vars(parser().parse_args(flags))
    job_hosts, source = _hosts(values, local_names)
    # If the program runs on other hosts alone, those are asked instead.
    _check_program(
        program, values["mode"] == IN_GRAPH or any(h.local for h in job_hosts)
    )
    if values["tunnel"] and values["insecure"]:
        raise LaunchError("--tunnel and --insecure were both given; leave out one")
    if not any(not host.local for host in job_hosts):
        _refuse_ssh_flags(values)
    _check_identity(values["identity"])
    min_nodes = values["min_nodes"]
    if values["mode"] == ASYNC and values["tunnel"]:
        raise LaunchError("--tunnel is not for --mode=async; use --insecure")
    if values["servers"] > (len(job_hosts) if values["mode"] == ASYNC else 1):
        raise LaunchError(
            f"--servers={values['servers']}, but there are {len(job_hosts)} hosts"
            if values["mode"] == ASYNC
            else "--servers is for --mode=async"
        )
    if min_nodes is not None and values["mode"] != IN_GRAPH:
        raise LaunchError(
            "--min-nodes is for --mode=in-graph: programs of --mode=between need all "
            "hosts, those of --mode=async continue with any number"
        )
    if min_nodes is not None and min_nodes > len(job_hosts):
        raise LaunchError(
            f"--min-nodes={min_nodes}, but there are {len(job_hosts)} hosts"
        )
    variables = dict(_variable(text, environment) for text in values.pop("env"))
    return Job(tuple(job_hosts), source, tuple(program), env=variables, **values)


def _dashes(argument: str) -> str:
    """Replaces underscores of older torchrun flags: --max_restarts=1."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-') if name[:2] == '--' else name}{equals}{value}"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the launcher's flags; the documentation uses it, too."""
    flags = _Parser(
        prog="python -m replicator.launch", usage=_USAGE, allow_abbrev=False
    )
    for name, options in _FLAGS.items():
        flags.add_argument(f"--{name}", **options)
    return flags


def _check_program(program: Sequence[str], is_local: bool) -> None:
    if not program or program == ["-m"]:
        raise LaunchError(f"there is no program to run; usage: {_USAGE}")
    script = pathlib.Path(program[0])
    if program[0] != "-m" and not (program[0] and (script.exists() or not is_local)):
        raise LaunchError(f"the program {program[0]} does not exist")


def _hosts(
    values: dict[str, Any], local_names: Collection[str]
) -> tuple[Sequence[JobHost], str]:
    """Returns the hosts, and the flag that named them."""
    names, path = values.pop("hosts"), values.pop("hostfile")
    count, slots = values.pop("nnodes"), values.pop("nproc_per_node") or 1
    if names is not None and path is not None:
        raise LaunchError("--hosts and --hostfile were both given; leave out one")
    if names is not None:
        job_hosts, source = (
            hosts.parse_hosts(names, slots, local_names),
            f"--hosts={names}",
        )
    elif path is not None:
        try:
            text = pathlib.Path(path).read_text()
        except (OSError, ValueError) as error:
            raise LaunchError(f"--hostfile: {path}: {_why(error)}") from error
        job_hosts = hosts.parse_hostfile(text, slots, local_names, path)
        source = f"--hostfile={path}"
    else:
        source = f"--nnodes={count or 1} --nproc-per-node={slots}"
        return hosts.local_hosts(count or 1, slots), source
    if count is not None and count > len(job_hosts):
        raise LaunchError(
            f"--nnodes={count}, but {source} names {len(job_hosts)} hosts"
        )
    return job_hosts[:count], source


def _refuse_ssh_flags(values: Mapping[str, Any]) -> None:
    """Refuses flags that have no effect if all hosts are this one."""
    for name in ("ssh_port", "identity", "sync", "python"):
        if values[name]:
            flag = name.replace("_", "-")
            raise LaunchError(f"--{flag} is for other hosts, but none is named")


def _check_identity(path: str | None) -> None:
    try:
        if path is not None:
            pathlib.Path(path).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:
        raise LaunchError(f"--identity: {path}: {_why(error)}") from error


def _variable(text: str, environment: Mapping[str, str]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise LaunchError(f"--env: {text[:50]!r} is not of the form NAME or NAME=VALUE")
    if not equals and name not in environment:
        raise LaunchError(f"--env={name}: there is no such variable; give NAME=VALUE")
    return name, value if equals else environment[name]


def _why(error: Exception) -> str:
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error)
