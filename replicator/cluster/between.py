# SPDX-License-Identifier: Apache-2.0
"""Between-graph mode: every host runs the program, and builds a graph of its own.

A process that ends, or is silent for longer than the heartbeat, is an error in all
others: TensorFlow's coordination service and our own lookout.py see to that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, devices, errors
from replicator.cluster import description, faults, lookout, peers
from replicator.cluster.cluster import Cluster
from replicator.options import Options


class JoinedCluster(Cluster):
    """The hosts that run this program together, as `replicator.connect` returns it.

    Attributes:
        host_id: Which of them this is.
    """

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
        """True: a process that has joined others cannot leave them but by its end."""
        return True

    def check(self) -> None:
        """Asks all other hosts whether they are there.

        Takes milliseconds, or `heartbeat` seconds if one is silent.

        Raises:
            HostLostError: One is not, or its program has ended.
        """
        faults.ask(self.heartbeat)

    def close(self) -> None:
        """Does nothing: the end of the process ends the connection."""


def join(
    described: description.Description, task: int, limit: float, silence: float
) -> JoinedCluster:
    """Makes this process one of those that run the program together.

    Args:
        described: The hosts.
        task: Which of them this is.
        limit: Seconds to wait for all.
        silence: Seconds after which a silent one counts as lost.

    Raises:
        ClusterError: It cannot.
    """
    if not 0 <= task < len(described.hosts):
        raise errors.ClusterError(
            errors.compose(
                f"connect was given task={task}, and {described.source} has "
                f"{len(described.hosts)} hosts.",
                fix="number the hosts from 0 on.",
            )
        )
    if _tf.has_started() or _tf.joined() is not None:
        raise errors.ClusterError(
            errors.compose(
                "TensorFlow was in use before replicator.connect.",
                [f"at {errors.user_line()}"],
                "connect first in between-graph mode: it cannot be done later, nor "
                "twice.",
            )
        )
    devices.split_cpu(described.hosts[task].cpus or 1)
    addresses = [host.address for host in described.hosts]
    try:
        with _own_sigterm():
            _tf.join(addresses, task, silence, limit)
    except (tf.errors.OpError, RuntimeError) as error:
        raise errors.ClusterError(
            errors.compose(
                f"host {task} ({addresses[task]}) could not join the others: "
                f"{errors.told(error)}.",
                [f"the hosts of {described.source}: {', '.join(addresses)}"],
                "see that the same program runs on all of them, that the ports are "
                "free, and that no firewall is between the hosts.",
            )
        ) from error
    known = peers.facts()
    assert known is not None, "it has joined"
    lookout.begin(described.hosts, task, silence)
    with faults.named():
        peers.tell_devices(task, devices.own())
        names = peers.devices(known, limit)
    return JoinedCluster(described, task, names, silence)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Has SIGTERM do afterwards what it did before.

    TensorFlow, when it joins, has itself told of it in place of the program, which then
    neither ends nor saves. Python changes this in its main thread only.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and before is not None:
            signal.signal(signal.SIGTERM, before)


def checked(
    together: peers.Peers,
    names: Sequence[Sequence[str]],
    options: Options,
    strategy: str = "",
) -> Options:
    """Returns the options of a Replicator of several processes, alike in all of them.

    Raises:
        MismatchError: The processes make different ones.
        ArgumentError: There is an option that is for one process.
    """
    for name, value, only in (
        ("variables", options.variables, ("auto", "mirrored")),
        ("build", options.build, ("trace",)),
    ):
        if value not in only:
            raise errors.ArgumentError(
                errors.compose(
                    f"Replicator was given {name}={value!r}, which is for programs "
                    "that one process builds.",
                    fix=f"pass {name}={only[-1]!r} in between-graph mode.",
                )
            )
    facts: dict[str, Any] = dataclasses.asdict(options)
    facts["calibration"] = repr(facts["calibration"])
    together.same(
        "makes a Replicator",
        {"devices": [list(own) for own in names], **facts, "strategy": strategy},
        "make the Replicator with the same arguments on every host.",
    )
    return dataclasses.replace(options, variables="mirrored")
