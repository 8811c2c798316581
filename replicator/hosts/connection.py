# SPDX-License-Identifier: Apache-2.0
"""`connect` makes the devices of all hosts' servers devices of this process.

TensorFlow has one connection per process and can be asked for it, so this module keeps
no state; a Cluster holds only its own facts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, overload

import tensorflow as tf
from absl import logging

from replicator import context, devices, errors, options
from replicator._tf import autograph, cluster
from replicator.cluster import (
    addresses,
    closing,
    description,
    health,
    sources,
    state,
    waiting,
    watch,
)
from replicator.cluster.state import CLIENT, TRAINER, WORKER
from replicator.hosts import between
from replicator.hosts.asynchronous import workers
from replicator.hosts.cluster import Cluster

_LONGEST = 1e6  # seconds; more is a mistake, and too long for sockets
_ATTEMPTS = 3  # at finding a port for this process that stays free


@overload
def connect(
    hosts: Any = None,
    *,
    timeout: float = ...,
    heartbeat: float | None = ...,
    client: str | None = ...,
    task: int | None = ...,
    optional: Literal[False] = ...,
) -> Cluster: ...


@overload
def connect(
    hosts: Any = None,
    *,
    timeout: float = ...,
    heartbeat: float | None = ...,
    client: str | None = ...,
    task: int | None = ...,
    optional: Literal[True],
) -> Cluster | None: ...


@autograph.not_converted
def connect(
    hosts: Any = None,
    *,
    timeout: float = 60.0,
    heartbeat: float | None = None,
    client: str | None = None,
    task: int | None = None,
    optional: bool = False,
) -> Cluster | None:
    """Connects this process to the servers of all hosts and returns the cluster.

    The hosts' devices become devices of this process, and `Replicator(None)` runs on
    all of them. Connect before any other use of TensorFlow: variables created earlier
    cannot be used afterwards. Connecting discards all state on the hosts.

    Example:
        >>> cluster = replicator.connect(addresses)  # where servers listen
        >>> repl = replicator.Replicator(cluster.devices)
        >>> [int(x) for x in repl.run(lambda: repl.all_reduce(repl.replica_id))]
        [6, 6, 6, 6]

    Args:
        hosts: ["host:port", ...] where `python -m replicator.serve` listens; a
            ResourceSpec or the path of its YAML file; or a resolver of
            tf.distribute.cluster_resolver. By default, the hosts come from the
            environment: REPLICATOR_CLUSTER (which `python -m replicator.launch` sets),
            TF_CONFIG, REPLICATOR_HOSTFILE, Slurm or mpirun.
        timeout: How many seconds to wait for all hosts.
        heartbeat: How many seconds a host may be silent before it counts as lost; by
            default 10, or the launcher's setting.
        client: The "host:port" at which the hosts reach this process; port 0 stands for
            a free port. By default, the address from which this process reaches them.
        task: The number of this host, from 0, in between-graph mode, where every host
            runs the program in place of a server. `python -m replicator.launch
            --mode=between` sets it.
        optional: Whether to return None, and connect to nothing, where `hosts` is None
            and nothing in the environment describes hosts: the same program then runs
            with the launcher and without.

    Returns:
        The cluster; `Replicator(cluster.devices)` runs on it, and so does
        `Replicator()`. None if there is none and `optional` is True.

    Raises:
        ClusterError: There is no description of hosts, or it is wrong; a host does not
            answer; or this process is connected already.
        ArgumentError: A time is not a positive number, `client` is no address, or
            `optional` is no bool.
        ContextError: Called inside a step or a graph.
    """
    _refuse_place()
    limit = _positive("timeout", timeout)
    _check_client(client)
    options.check("connect", "optional", optional, (False, True))
    described = sources.find(hosts, os.environ, optional)
    if described is None:
        return None
    silence = _positive(
        "heartbeat",
        described.heartbeat or description.HEARTBEAT
        if heartbeat is None
        else heartbeat,
    )
    task = described.task if task is None else task
    if task is not None and not described.programs:
        return between.join(described, task, limit, silence)
    _refuse_connected(silence)
    if described.programs:
        devices.split_cpu(described.programs[described.task or 0].cpus or 1)
    _wait(described, limit, silence)
    if cluster.has_started() and cluster.connection() is None:
        logging.warning(
            "TensorFlow was in use before replicator.connect: variables and "
            "tf.functions created before it can no longer be used. Connect first."
        )
    state.order()
    token = _connected(described, client or described.client)
    try:
        names = _devices(described)
    except errors.ClusterError:
        health.leave(described.hosts, {})
        raise
    watch.begin(described.hosts, token, silence)
    if described.programs:
        return workers.join(described, token, limit, silence)
    return Cluster(described, token, names, silence)


def _refuse_place() -> None:
    """Raises ContextError inside a step or a graph, where TensorFlow cannot connect."""
    if context.current() is not None or not tf.executing_eagerly():
        where = "inside a step" if context.current() is not None else "in a graph"
        raise errors.ContextError(
            f"connect was called {where}.",
            fix="connect at the beginning of the program, while TensorFlow executes "
            "eagerly.",
        )


def _positive(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= _LONGEST:
        raise errors.ArgumentError(
            f"connect was given {name}={errors.repr_of(value)}.",
            fix=f"pass a number of seconds above 0, at most {_LONGEST:g}.",
        )
    return float(value)


def _check_client(client: Any) -> None:
    try:
        if client is not None:
            addresses.split(client)
    except (ValueError, AttributeError, TypeError):
        raise errors.ArgumentError(
            f"connect was given client={errors.repr_of(client)}.",
            fix='pass "host:0", the address at which the hosts reach this one.',
        ) from None


def _refuse_connected(silence: float) -> None:
    """Refuses to connect twice; closes an old connection that has lost hosts."""
    token = cluster.connection()
    if token is None:
        return
    if token.job_name not in (CLIENT, TRAINER):
        raise errors.ClusterError(
            "this process is already connected, by "
            "tf.config.experimental_connect_to_cluster.",
            fix="connect only with replicator.connect, in a new process.",
        )
    old_addresses = state.connected_hosts()
    if not old_addresses:
        return
    old_hosts = [description.Host(name=a, address=a) for a in old_addresses]
    problems = health.lost(old_hosts, silence)
    if not problems:
        raise errors.ClusterError(
            f"this process is already connected to {', '.join(old_addresses)}.",
            fix="use the Cluster that connect returned, or call its close() first.",
        )
    health.leave(old_hosts, problems)


def _wait(described: description.Description, limit: float, silence: float) -> None:
    """Waits until all hosts answer; raises ClusterError if some do not in time."""
    count = len(described.hosts)

    def progress(problems: Mapping[str, str], elapsed: float) -> None:
        logging.warning(
            "replicator.connect is waiting for %d of %d hosts (%.0f s so far, at most "
            "%.0f s): %s",
            len(problems),
            count,
            elapsed,
            limit,
            "; ".join(health.describe(described.hosts, problems)),
        )

    host_addresses = [host.address for host in described.hosts]
    problems = waiting.wait_for(host_addresses, limit, silence, progress)
    if problems:
        raise errors.ClusterError(
            f"{len(problems)} of {count} hosts did not answer within {limit:g} s.",
            [
                *health.describe(described.hosts, problems),
                f"the hosts are those of {described.source}",
                f"at {errors.user_line()}",
            ],
            f"{health.START}; check that no firewall separates the hosts.",
        )


def _connected(described: description.Description, client: str | None) -> Any:
    """Makes TensorFlow connect; returns the connection's token."""
    servers = dict(enumerate(host.address for host in described.hosts))
    host_addresses = servers.values()
    job, task = (TRAINER, described.task or 0) if described.programs else (CLIENT, 0)
    for attempt in range(_ATTEMPTS):
        local = _own_address(client, described)
        try:
            jobs = {job: {task: local}, WORKER: servers}
            with closing.own_server(local, described.sources):
                return cluster.connect(jobs, job, task, health.CHANNELS)
        except (tf.errors.OpError, RuntimeError) as error:
            port_in_use = "Could not start gRPC server" in str(error)
            if port_in_use and attempt + 1 < _ATTEMPTS and cluster.connection() is None:
                continue
            problem = (
                f"port {addresses.split(local)[1]} of this host is taken."
                if port_in_use
                else f"TensorFlow could not connect: {errors.summary(error)}."
            )
            raise errors.ClusterError(
                problem,
                [
                    f"the hosts of {described.source}: {', '.join(host_addresses)}",
                    f"at {errors.user_line()}",
                ],
                "check that every host has the same version of TensorFlow, and that "
                f"{local} is this host's address as the others see it (`client=`).",
            ) from error
    raise AssertionError("unreachable")


def _own_address(client: str | None, described: description.Description) -> str:
    """Returns the address at which the hosts reach this process.

    All connections use the port of the first: TensorFlow never stops its server there.
    """
    try:
        host, port = (
            addresses.split(client) if client else (_client_address(described), None)
        )
    except (ValueError, OSError) as error:
        raise errors.ClusterError(
            f"the address of this process is unknown: {errors.summary(error)}.",
            fix='pass client="host:0", the address at which the hosts reach this one.',
        ) from error
    old_connection = cluster.connection()
    if old_connection is not None:
        port = addresses.split(state.own_address(old_connection))[1]
    return addresses.join(host, port or addresses.free_port())


def _client_address(described: description.Description) -> str:
    """Returns the address from which this process reaches the hosts.

    One of them may be this very host, for which /etc/hosts may name a loopback
    address; that is useless to the others, so other addresses are preferred.
    """
    candidates = [
        addresses.own_address(*addresses.split(host.address))
        for host in described.hosts
    ]
    return next(
        (address for address in candidates if not addresses.is_loopback(address)),
        candidates[0],
    )


def _devices(described: description.Description) -> list[str]:
    """Returns the actual devices of all hosts; refuses unexpected numbers of CPUs."""
    names = devices.of_hosts([d.name for d in tf.config.list_logical_devices()])
    for k, host in enumerate(described.hosts):
        device_types = [
            spec.device_type
            for spec in map(tf.DeviceSpec.from_string, names)
            if spec.task == k
        ]
        cpus = device_types.count("CPU")  # none are listed beside accelerators
        if host.cpus and cpus and host.cpus != cpus:
            raise errors.ClusterError(
                f"{host.name} has {cpus} CPU devices; {described.source} says "
                f"{host.cpus}.",
                fix="start its server with `python -m replicator.serve "
                f"--cpus={host.cpus}`.",
            )
    return names
