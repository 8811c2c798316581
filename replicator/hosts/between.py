# SPDX-License-Identifier: Apache-2.0
"""Between-graph mode: every host runs the program and builds its own graph.

TensorFlow's coordination service and lookout.py raise an error in all other processes
when one ends, or is silent for longer than the heartbeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, devices, errors
from replicator._tf import cluster
from replicator.cluster import closing, description, faults, lookout, peers
from replicator.hosts.cluster import Cluster
from replicator.options import Options


class JoinedCluster(Cluster):
    """The hosts that run this program together; returned by `replicator.connect`."""

    def __init__(
        self,
        described: description.Description,
        task: int,
        names: Sequence[str],
        heartbeat: float,
    ) -> None:
        super().__init__(described, None, names, heartbeat)
        self.host_id = task

    @property
    def connected(self) -> bool:
        """True: a process that has joined others leaves them only by ending."""
        return True

    def check(self) -> None:
        """Checks that all other hosts answer.

        Takes milliseconds, or `heartbeat` seconds if one is silent.

        Raises:
            HostLostError: A host does not answer, or its program has ended.
        """
        faults.ask(self.heartbeat)

    def close(self) -> None:
        """Does nothing: the end of the process ends the connection."""


def join(
    described: description.Description, task: int, limit: float, silence: float
) -> JoinedCluster:
    """Joins this process to those that run the program together.

    Args:
        described: The hosts.
        task: The number of this host.
        limit: How many seconds to wait for all processes.
        silence: How many seconds a process may be silent before it counts as lost.

    Raises:
        ClusterError: The process cannot join.
    """
    if not arguments.is_whole(task, 0, len(described.hosts) - 1):
        raise errors.ClusterError(
            f"connect was given task={errors.repr_of(task)}, but {described.source} "
            "has "
            f"{len(described.hosts)} hosts.",
            fix="number the hosts from 0.",
        )
    if cluster.has_started() or cluster.joined() is not None:
        raise errors.ClusterError(
            "TensorFlow was in use before replicator.connect.",
            fix="in between-graph mode, connect first, and only once.",
        )
    devices.split_cpu(described.hosts[task].cpus or 1)
    addresses = [host.address for host in described.hosts]
    try:
        with _own_sigterm(), closing.own_server(addresses[task], described.sources):
            cluster.join(addresses, task, silence, limit)
    except (tf.errors.OpError, RuntimeError) as error:
        raise errors.ClusterError(
            f"host {task} ({addresses[task]}) could not join the others: "
            f"{errors.summary(error)}.",
            [f"the hosts of {described.source}: {', '.join(addresses)}"],
            "check that all of them run the same program, that the ports are free, and "
            "that no firewall separates the hosts.",
        ) from error
    facts = peers.process_group()
    assert facts is not None, "it has joined"
    lookout.begin(described.hosts, task, silence)
    with faults.named():
        peers.tell_devices(task, devices.local())
        names = peers.devices(facts, limit)
    return JoinedCluster(described, task, names, silence)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restores the program's SIGTERM handler after the block.

    When TensorFlow joins, it installs a handler of its own, with which the program
    would neither end nor save. Python can set handlers in its main thread only.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def checked(
    processes: peers.Peers,
    names: Sequence[Sequence[str]],
    options: Options,
    strategy: str = "",
) -> Options:
    """Returns the options of a Replicator of several processes, equal in all of them.

    Raises:
        MismatchError: The processes make different Replicators.
        ArgumentError: An option does not support several processes.
    """
    for name, value, allowed in (
        ("variables", options.variables, ("auto", "mirrored")),
        ("build", options.build, ("trace",)),
    ):
        if value not in allowed:
            raise errors.ArgumentError(
                f"Replicator was given {name}={value!r}, which is only for programs "
                "built by one process.",
                fix=f"pass {name}={allowed[-1]!r} in between-graph mode.",
            )
    facts: dict[str, Any] = dataclasses.asdict(options)
    facts["calibration"] = repr(facts["calibration"])
    processes.check_equal(
        "creates a Replicator",
        {
            "devices": [list(replica) for replica in names],
            **facts,
            "strategy": strategy,
        },
        "create the Replicator with the same arguments on every host.",
    )
    return dataclasses.replace(options, variables="mirrored")
