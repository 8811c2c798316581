# SPDX-License-Identifier: Apache-2.0
"""Parses the hosts of a job: `--hosts`, `--hostfile`, `--nnodes`. Pure."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Collection, Sequence

from replicator.launch import hostfile

_LOCAL = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")


class LaunchError(Exception):
    """Ends the launcher with one line of text.

    Args:
        text: The line.
        status: The exit status; 2 if the launcher was called wrongly.
    """

    def __init__(self, text: str, status: int = 2) -> None:
        super().__init__(text)
        self.status = status


@dataclasses.dataclass(frozen=True)
class JobHost:
    """A host of a job.

    Attributes:
        name: The user's unique name for the host: a name, an address, or an alias of
            ~/.ssh/config.
        slots: The number of its replicas if they are on CPUs.
        user: The user to log in as; None leaves it to ~/.ssh/config.
        local: Whether it is the launcher's own host, which needs no SSH.
    """

    name: str
    slots: int = 1
    user: str | None = None
    local: bool = False


def own_names() -> frozenset[str]:
    """Returns the names by which this host knows itself."""
    name = socket.gethostname()
    return frozenset({*_LOCAL, name, name.partition(".")[0], socket.getfqdn()})


def parse_hosts(text: str, slots: int, local_names: Collection[str]) -> list[JobHost]:
    """Parses the hosts of `--hosts`.

    Args:
        text: E.g. "host-a,alice@host-b:2,[::1]:4": names, each with an optional user
            and number of replicas.
        slots: The default number of replicas.
        local_names: The names of this host.

    Raises:
        LaunchError: A part is not of this form, or a host is named twice.
    """
    parts = [part.strip() for part in text.split(",")]
    return _distinct(
        [_host(part, slots, local_names, "--hosts") for part in parts], "--hosts"
    )


def parse_hostfile(
    text: str, slots: int, local_names: Collection[str], path: str
) -> list[JobHost]:
    """Parses a hostfile in the format of Open MPI, horovodrun or MPICH.

    Args:
        text: The file's text: on each line a host with optional ":2" or " slots=2" (and
            " max_slots=4", which must not be less); a "#" begins a comment.
        slots: The default number of replicas.
        local_names: The names of this host.
        path: The file's path, for messages.

    Raises:
        LaunchError: A line is not of this form, a host is named twice, or none is.
    """
    hosts = []
    try:
        for line in hostfile.lines(text):
            host = _host(line.host, slots, local_names, f"{path}, line {line.number}")
            host = dataclasses.replace(host, slots=line.slots or host.slots)
            if line.most is not None and line.most < host.slots:
                raise hostfile.HostfileError(line.number, "more slots than max_slots")
            hosts.append(host)
    except hostfile.HostfileError as error:
        raise LaunchError(f"{path}, line {error.number}: {error}") from None
    if not hosts:
        raise LaunchError(f"{path} names no host")
    return _distinct(hosts, path)


def local_hosts(count: int, slots: int) -> list[JobHost]:
    """Returns `count` hosts that are all this one: `--nnodes` without `--hosts`."""
    return [JobHost(f"localhost-{k}", slots, local=True) for k in range(count)]


def _host(text: str, slots: int, local_names: Collection[str], where: str) -> JobHost:
    user, at, rest = text.rpartition("@")
    if rest.startswith("["):
        name, _, count = rest[1:].partition("]")
        matches = bool(_IPV6.fullmatch(name)) and count[:1] in ("", ":")
        colon, count = count[:1], count[1:]
    elif rest.count(":") > 1:  # an IPv6 address without a number
        name, colon, count = rest, "", ""
        matches = bool(_IPV6.fullmatch(name))
    else:
        name, colon, count = rest.partition(":")
        matches = bool(_NAME.fullmatch(name))
    if not matches or (at and not re.fullmatch(r"[^\s@:,-][^\s@:,]*", user)):
        raise LaunchError(
            f"{where}: {text[:100]!r} is not a host; expected NAME, NAME:SLOTS or "
            "USER@NAME:SLOTS"
        )
    if colon:
        slots = _slots(count, f"{where}: {text}")
    return JobHost(name, slots, user or None, local=not user and name in local_names)


def _slots(text: str, where: str) -> int:
    try:
        return hostfile.count(text)
    except ValueError as error:
        raise LaunchError(f"{where}: {error}") from None


def _distinct(hosts: Sequence[JobHost], where: str) -> list[JobHost]:
    names: set[str] = set()
    for host in hosts:
        if host.name in names:
            raise LaunchError(
                f"{where}: {host.name} is named twice; "
                f"{host.name}:2 puts two replicas on it"
            )
        names.add(host.name)
    if sum(host.local for host in hosts) > 1:
        local_names = " and ".join(host.name for host in hosts if host.local)
        raise LaunchError(
            f"{where}: {local_names} are both this host; --nnodes=N makes several of it"
        )
    return list(hosts)
