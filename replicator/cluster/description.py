# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a cluster's hosts, and their checks. No TensorFlow, no network."""

from __future__ import annotations

import collections
import dataclasses
import ipaddress
import json
from collections.abc import Mapping, Sequence
from typing import Any

from replicator import errors
from replicator.cluster import addresses

HEARTBEAT = 10.0  # seconds a host may be silent
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Ssh:
    """How to reach a host by ssh to start a server on it."""

    username: str | None = None
    port: int = 22
    python_venv: str | None = None  # a file to source, as in AutoDist
    key_file: str | None = None
    shared_envs: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Host:
    """One host and its server."""

    name: str  # as the user wrote it
    address: str  # "host:port", where its server listens
    cpus: int | None = None  # CPU devices of its server; None accepts any number
    gpus: int | None = None
    chief: bool = False  # where the user's program runs
    bandwidth: float = 1.0  # network bandwidth, Gbit/s
    ssh: Ssh | None = None


@dataclasses.dataclass(frozen=True)
class ProgramDescription:
    """One of the programs that train together in asynchronous mode."""

    name: str  # of its host, as the user wrote it
    cpus: int | None = None  # number of logical CPU devices


@dataclasses.dataclass(frozen=True)
class Description:
    """The hosts of a cluster, in the order of their replicas."""

    hosts: tuple[Host, ...]
    source: str  # where the description is, for messages: "TF_CONFIG"
    client: str | None = None  # "host:port" of the user's program; port 0: any free one
    heartbeat: float | None = None
    task: int | None = None  # between-graph: the number of this process's host
    # Asynchronous mode: all programs; this process is number `task`, and `hosts` are
    # the servers that hold the variables.
    programs: tuple[ProgramDescription, ...] = ()
    # The addresses from which the hosts and programs connect; () if not all are known.
    sources: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Returns the JSON that `from_json` reads: the value of REPLICATOR_CLUSTER."""
        hosts = [
            {"name": h.name, "address": h.address, "cpus": h.cpus, "gpus": h.gpus}
            for h in self.hosts
        ]
        facts = {"version": _VERSION, "source": self.source, "hosts": hosts}
        if self.client is not None:
            facts["client"] = self.client
        if self.heartbeat is not None:
            facts["heartbeat"] = self.heartbeat
        if self.task is not None:
            facts["task"] = self.task
        if self.programs:
            facts["programs"] = [
                dataclasses.asdict(program) for program in self.programs
            ]
        if self.sources:
            facts["sources"] = list(self.sources)
        return json.dumps(facts)


def from_json(text: str, where: str) -> Description:
    """Parses the JSON that `Description.to_json` writes.

    Args:
        text: JSON, as the launcher sets it.
        where: The source of the text, for messages: "REPLICATOR_CLUSTER".

    Raises:
        ClusterError: The text is no such JSON.
    """
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(where, f"it is not JSON: {errors.summary(error)}") from None
    if not isinstance(facts, Mapping) or facts.get("version") != _VERSION:
        raise wrong(where, f'it has no "version": {_VERSION}')
    hosts = facts.get("hosts")
    if not isinstance(hosts, list) or not all(isinstance(h, Mapping) for h in hosts):
        raise wrong(where, '"hosts" is not a list of objects')
    described = Description(
        tuple(_host(facts, where) for facts in hosts),
        str(facts.get("source", where)),
        _text(facts, "client", where),
        _seconds(facts.get("heartbeat"), where),
        _count(facts, "task", where),
        _programs(facts, where),
        _sources(facts, where),
    )
    return checked(described)


def of_addresses(
    listed: Sequence[str], source: str, *, client: str | None = None
) -> Description:
    """Describes hosts by their addresses alone.

    Args:
        listed: "host:port" each; the default port is addresses.DEFAULT_PORT.
        source: Where the addresses are from, for messages.
        client: The address of the user's program.

    Raises:
        ClusterError: One of them is no address, or is listed twice.
    """
    hosts = [Host(name=text, address=text) for text in listed]
    return checked(Description(tuple(hosts), source, client))


def checked(described: Description) -> Description:
    """Returns the description with complete addresses, after checking them.

    Raises:
        ClusterError: There are no hosts; an address is malformed or listed twice; or
            only some of them are loopback addresses.
    """
    where = described.source
    if not described.hosts:
        raise wrong(where, "it names no host", "name at least one")
    hosts, names = [], []
    for host in described.hosts:
        name, port = _split(host.address, where)
        if port is None:
            port = addresses.DEFAULT_PORT
        if port == 0:
            raise wrong(
                where,
                f"{host.name} has port 0, at which no server can listen",
                "give the port that `python -m replicator.serve` printed",
            )
        hosts.append(dataclasses.replace(host, address=addresses.join(name, port)))
        names.append(name)
    _refuse_twice(hosts, where)
    _refuse_mixed(names, described)
    if described.client is not None:
        _split(described.client, where)
    return dataclasses.replace(described, hosts=tuple(hosts))


def wrong(where: str, problem: str, fix: str = "") -> errors.ClusterError:
    """Returns the error for an invalid description.

    Args:
        where: The source of the description: "REPLICATOR_CLUSTER".
        problem: What is wrong with it, without a full stop.
        fix: How to correct it.
    """
    text = f"{where} does not describe a cluster: {problem}."
    fix = fix or "correct it there; docs/guides/hosts.md says what it may contain."
    return errors.ClusterError(text, fix=fix)


def _split(address: Any, where: str) -> tuple[str, int | None]:
    try:
        if not isinstance(address, str):
            raise ValueError(f"{errors.repr_of(address)} is not an address")
        return addresses.split(address)
    except ValueError as error:
        raise wrong(where, str(error), 'write "host:port"') from None


def _refuse_twice(hosts: Sequence[Host], where: str) -> None:
    counts = collections.Counter(host.address for host in hosts)
    for host in hosts:
        if counts[host.address] > 1:
            raise wrong(
                where,
                f"{host.address} is listed {counts[host.address]} times",
                "list each server once; one server may have several devices, "
                "`python -m replicator.serve --cpus=2`",
            )


def _refuse_mixed(names: Sequence[str], described: Description) -> None:
    """Refuses loopback addresses among others: they mean each host itself."""
    local = [name for name in names if addresses.is_loopback(name)]
    if local and len(local) < len(names):
        other = next(name for name in names if not addresses.is_loopback(name))
        raise wrong(
            described.source,
            f"{local[0]} is a loopback address, which on {other} means {other} itself",
            f"give the address by which {other} reaches this host",
        )


def _host(facts: Mapping[str, Any], where: str) -> Host:
    address = facts.get("address")
    if not isinstance(address, str):
        raise wrong(where, 'a host has no "address"')
    return Host(
        name=_text(facts, "name", where) or address,
        address=address,
        cpus=_count(facts, "cpus", where),
        gpus=_count(facts, "gpus", where),
    )


def _programs(facts: Mapping[str, Any], where: str) -> tuple[ProgramDescription, ...]:
    programs = facts.get("programs", [])
    if not isinstance(programs, list) or not all(
        isinstance(p, Mapping) for p in programs
    ):
        raise wrong(where, '"programs" is not a list of objects')
    task = facts.get("task")
    if programs and (task is None or not 0 <= task < len(programs)):
        raise wrong(where, f'there are {len(programs)} programs, but "task" is {task}')
    return tuple(
        ProgramDescription(
            _text(p, "name", where) or f"worker {n}", _count(p, "cpus", where)
        )
        for n, p in enumerate(programs)
    )


def _sources(facts: Mapping[str, Any], where: str) -> tuple[str, ...]:
    sources = facts.get("sources", [])
    try:
        return tuple(str(ipaddress.ip_address(str(address))) for address in sources)
    except (TypeError, ValueError):
        raise wrong(where, '"sources" is not a list of numbers of hosts') from None


def _text(facts: Mapping[str, Any], key: str, where: str) -> str | None:
    value = facts.get(key)
    if value is not None and not isinstance(value, str):
        raise wrong(where, f'"{key}" is {errors.repr_of(value)}, which is not text')
    return value


def _count(facts: Mapping[str, Any], key: str, where: str) -> int | None:
    value = facts.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise wrong(where, f'"{key}" is {errors.repr_of(value)}, which is not a count')
    return value


def _seconds(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise wrong(
            where, f'"heartbeat" is {errors.repr_of(value)}, which is not a time'
        )
    return float(value)
