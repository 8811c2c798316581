"""connect and Cluster: the servers of all hosts, used by this process.

TensorFlow has one connection per process; which one it is, it says itself. So nothing
is kept here but what a Cluster knows of its own.
"""

from __future__ import annotations

import os
import types
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import _tf, context, devices, errors
from replicator.cluster import addresses, description, sources, state, waiting
from replicator.cluster.state import CLIENT, WORKER

_CHANNELS = 2  # two carry a third more than one; more bring nothing
_ATTEMPTS = 3  # to find a port of our own that stays free

_START = (
    "start `python -m replicator.serve` on each host, or the whole program by "
    "`python -m replicator.launch`"
)


class Cluster:
    """The hosts to which this process is connected, as `replicator.connect` returns it.

    In a `with` block it is closed at the end.

    Attributes:
        source: Where the hosts were found, e.g. "REPLICATOR_CLUSTER".
        heartbeat: Seconds that a host may be silent.
    """

    def __init__(
        self,
        described: description.Description,
        token: Any,
        names: Sequence[str],
        heartbeat: float,
    ) -> None:
        self._hosts = described.hosts
        self._token = token
        self._devices = tuple(names)
        self.source = described.source
        self.heartbeat = heartbeat

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts, as they were given; host k is task k of the job "worker"."""
        return tuple(host.name for host in self._hosts)

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return len(self._hosts)

    @property
    def devices(self) -> tuple[str, ...]:
        """The full name of the device of each replica, host by host.

        All accelerators of all hosts, or all their CPU devices if there are none.
        """
        return self._devices

    @property
    def connected(self) -> bool:
        """Whether it was neither closed nor replaced by another connection."""
        return _tf.connection() is self._token

    def host_of(self, device: str) -> str:
        """Returns the host that a device is on, as it was given.

        Args:
            device: One of `devices`.

        Raises:
            DeviceError: It is on none of the hosts.
        """
        try:
            spec = tf.DeviceSpec.from_string(device)
        except (ValueError, TypeError, AttributeError):
            spec = tf.DeviceSpec()
        if spec.job != WORKER or spec.task not in range(self.num_hosts):
            raise errors.DeviceError(
                errors.compose(
                    f"{errors.shown(device)} is on none of {', '.join(self.hosts)}.",
                    fix="name a device as cluster.devices does.",
                )
            )
        return self._hosts[spec.task].name

    def check(self) -> None:
        """Asks all hosts whether they are there and still hold what was made on them.

        Takes milliseconds, or `heartbeat` seconds if a host is silent.

        Raises:
            ClusterError: Some are not, by their names, or the connection was closed.
        """
        if not self.connected:
            raise errors.ClusterError(
                errors.compose(
                    f"{self!r} was asked for its hosts.",
                    fix="connect again: cluster = replicator.connect().",
                )
            )
        problems = _lost(self._hosts, self.heartbeat)
        if problems:
            raise errors.ClusterError(
                errors.compose(
                    f"{len(problems)} of {self.num_hosts} hosts are lost; variables "
                    "on them are gone, those on others may be half written.",
                    problems,
                    f"{_START}; then connect again and restore a checkpoint.",
                )
            )

    def close(self) -> None:
        """Ends the connection; variables on the hosts are gone, the servers stay.

        Raises:
            ClusterError: A host is silent, which TensorFlow would wait for.
        """
        if self.connected:
            _leave(self._hosts, self.heartbeat)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        try:
            self.close()
        except errors.ClusterError:
            if error is None:  # what ended the block says more than this
                raise

    def __repr__(self) -> str:
        state = "" if self.connected else ", closed"
        hosts = ", ".join(self.hosts)
        return f"<Cluster of {hosts}: {len(self._devices)} devices{state}>"


def connect(
    hosts: Any = None,
    *,
    timeout: float = 60.0,
    heartbeat: float | None = None,
    client: str | None = None,
) -> Cluster:
    """Connects this process to the servers of all hosts, and returns them.

    From then on their devices are devices of this process, and `Replicator(None)` runs
    on all of them. Call it before anything else of TensorFlow: variables that were made
    before cannot be used afterwards. What was on the hosts is gone.

    Args:
        hosts: ["host:port", ...] where `python -m replicator.serve` listens; a
            ResourceSpec or the path of its YAML file; or a resolver of
            tf.distribute.cluster_resolver. None: what the environment says, by
            REPLICATOR_CLUSTER (which `python -m replicator.launch` sets), TF_CONFIG,
            REPLICATOR_HOSTFILE, Slurm or mpirun.
        timeout: Seconds to wait for all hosts.
        heartbeat: Seconds that a host may be silent before it is taken for lost; 10, or
            what the launcher was told.
        client: The "host:port" by which the hosts reach this process; port 0 is a free
            one. None: this host's address on the way to the first of them.

    Returns:
        The cluster; `Replicator(cluster.devices)` runs on it.

    Raises:
        ClusterError: There is no description of hosts, or it is wrong; some do not
            answer; or this process is connected already.
        ContextError: Called inside a step or a graph.
    """
    _refuse_place()
    limit = _positive("timeout", timeout)
    described = sources.find(hosts, os.environ)
    silence = _positive(
        "heartbeat",
        heartbeat or described.heartbeat or description.HEARTBEAT
        if heartbeat is None
        else heartbeat,
    )
    _refuse_connected(silence)
    _wait(described, limit, silence)
    if _tf.has_started() and _tf.connection() is None:
        logging.warning(
            "TensorFlow was in use before replicator.connect: variables and "
            "tf.functions that were made before cannot be used any more. Connect first."
        )
    state.order()
    token = _connected(described, client or described.client)
    try:
        names = _devices(described)
    except errors.ClusterError:
        _leave(described.hosts, silence)
        raise
    return Cluster(described, token, names, silence)


def _refuse_place() -> None:
    """Refuses to connect where TensorFlow could not."""
    if context.current() is not None or not tf.executing_eagerly():
        where = "inside a step" if context.current() is not None else "in a graph"
        raise errors.ContextError(
            errors.compose(
                f"connect was called {where}.",
                fix="connect at the beginning of the program, while TensorFlow "
                "executes eagerly.",
            )
        )


def _positive(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise errors.ArgumentError(
            errors.compose(
                f"connect was given {name}={errors.shown(value)}.",
                fix="pass seconds, a number above 0.",
            )
        )
    return float(value)


def _refuse_connected(silence: float) -> None:
    """Refuses to connect while this process is; drops what is left of a failure."""
    token = _tf.connection()
    if token is None:
        return
    if token.job_name != CLIENT:
        raise errors.ClusterError(
            errors.compose(
                "this process is connected already, by "
                "tf.config.experimental_connect_to_cluster.",
                fix="connect by replicator.connect alone, in a new process.",
            )
        )
    before = state.connected_hosts()
    if not before:
        return
    left = [description.Host(name=a, address=a) for a in before]
    if not _lost(left, silence):
        raise errors.ClusterError(
            errors.compose(
                f"this process is connected already, to {', '.join(before)}.",
                fix="use the Cluster that connect returned, or call its close() first.",
            )
        )
    _leave(left, silence)


def _lost(hosts: Sequence[description.Host], silence: float) -> list[str]:
    """Returns what is wrong with those hosts that do not answer or know us no more."""
    problems = waiting.ask_all([host.address for host in hosts], silence)
    for k, host in enumerate(hosts):
        if host.address not in problems and not _tf.knows_us(
            f"/job:{WORKER}/replica:0/task:{k}"
        ):
            problems[host.address] = "its server was started again"
    return _told(hosts, problems)


def _told(hosts: Sequence[description.Host], problems: Mapping[str, str]) -> list[str]:
    """Returns a line for each host with a problem, as the user wrote it."""
    lines = []
    for host in hosts:
        if host.address in problems:
            at = "" if host.name == host.address else f" at {host.address}"
            lines.append(f"{host.name}{at}: {problems[host.address]}")
    return lines


def _leave(hosts: Sequence[description.Host], silence: float) -> None:
    """Disconnects; not from a silent host, for which TensorFlow would wait."""
    problems = waiting.ask_all([host.address for host in hosts], silence)
    silent = {a: p for a, p in problems.items() if p == waiting.SILENT}
    if silent:
        raise errors.ClusterError(
            errors.compose(
                "the connection cannot be ended while a host is silent.",
                _told(hosts, silent),
                "end its process, by SIGKILL if it is stopped; then try again.",
            )
        )
    client = tf.train.ClusterSpec(_tf.connection().cluster).job_tasks(CLIENT)
    _tf.connect({CLIENT: client}, CLIENT, _CHANNELS)


def _wait(described: description.Description, limit: float, silence: float) -> None:
    """Waits until all hosts answer."""
    count = len(described.hosts)

    def progress(problems: Mapping[str, str], passed: float) -> None:
        logging.warning(
            "replicator.connect waits for %d of %d hosts since %.0f s, for %.0f s at "
            "most: %s",
            *(len(problems), count, passed, limit),
            "; ".join(_told(described.hosts, problems)),
        )

    asked = [host.address for host in described.hosts]
    problems = waiting.wait_for(asked, limit, silence, progress)
    if problems:
        raise errors.ClusterError(
            errors.compose(
                f"{len(problems)} of {count} hosts did not answer within {limit:g} s.",
                [
                    *_told(described.hosts, problems),
                    f"the hosts are those of {described.source}",
                    f"at {errors.user_line()}",
                ],
                f"{_START}; see that no firewall is between the hosts.",
            )
        )


def _connected(described: description.Description, client: str | None) -> Any:
    """Has TensorFlow connect; returns the token of the connection."""
    workers = [host.address for host in described.hosts]
    for attempt in range(_ATTEMPTS):
        own = _own_address(client, described)
        try:
            return _tf.connect({CLIENT: [own], WORKER: workers}, CLIENT, _CHANNELS)
        except (tf.errors.OpError, RuntimeError) as error:
            taken = "Could not start gRPC server" in str(error)
            if taken and attempt + 1 < _ATTEMPTS and _tf.connection() is None:
                continue
            problem = (
                f"port {addresses.split(own)[1]} of this host is taken."
                if taken
                else f"TensorFlow could not connect: {errors.told(error)}."
            )
            raise errors.ClusterError(
                errors.compose(
                    problem,
                    [f"the hosts of {described.source}: {', '.join(workers)}"],
                    "see that every host has the same version of TensorFlow, and that "
                    f"{own} is this host's address as the others see it (`client=`).",
                )
            ) from error
    raise AssertionError("unreachable")


def _own_address(client: str | None, described: description.Description) -> str:
    """Returns the address by which the hosts reach this process.

    Its port stays that of the first connection: TensorFlow's server at it never ends.
    """
    token = _tf.connection()
    if token is not None:
        return str(tf.train.ClusterSpec(token.cluster).task_address(CLIENT, 0))
    try:
        if client is not None:
            host, port = addresses.split(client)
        else:
            towards, to_port = addresses.split(described.hosts[0].address)
            host, port = addresses.own_address(towards, to_port or 0), None
    except (ValueError, OSError) as error:
        raise errors.ClusterError(
            errors.compose(
                f"the address of this process is unknown: {errors.told(error)}.",
                fix='pass client="host:0", by which the hosts reach this one.',
            )
        ) from error
    return addresses.join(host, port or addresses.free_port())


def _devices(described: description.Description) -> list[str]:
    """Returns the devices of all hosts, as they are; refuses others than described."""
    found = devices.of_hosts([d.name for d in tf.config.list_logical_devices()])
    for k, host in enumerate(described.hosts):
        own = [
            spec.device_type
            for spec in map(tf.DeviceSpec.from_string, found)
            if spec.task == k
        ]
        cpus = own.count("CPU")  # none are listed beside accelerators
        if host.cpus and cpus and host.cpus != cpus:
            raise errors.ClusterError(
                errors.compose(
                    f"{host.name} has {cpus} CPU devices; {described.source} says "
                    f"{host.cpus}.",
                    fix="start its server by "
                    f"`python -m replicator.serve --cpus={host.cpus}`.",
                )
            )
    return found
