# SPDX-License-Identifier: Apache-2.0
"""Cluster: the hosts to which this process is connected."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.cluster import checkpoints, description, faults, health, sessions, state


class Cluster:
    """The hosts to which this process is connected, as `replicator.connect` returns it.

    In a `with` block it is closed at the end.

    Example:
        >>> with replicator.connect(addresses) as cluster:
        ...     repl = replicator.Replicator(cluster.devices)
        ...     print(cluster.num_hosts, "hosts,", repl.num_replicas, "replicas")
        2 hosts, 4 replicas

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
        """The hosts, as they were given; host k is task k of the job "worker".

        Example:
            >>> cluster.hosts == tuple(addresses)
            True
        """
        return tuple(host.name for host in self._hosts)

    @property
    def num_hosts(self) -> int:
        """The number of hosts.

        Example:
            >>> cluster.num_hosts
            2
        """
        return len(self._hosts)

    @property
    def devices(self) -> tuple[str, ...]:
        """The full name of the device of each replica, host by host.

        All accelerators of all hosts, or all their CPU devices if there are none.

        Example:
            >>> cluster.devices[2]
            '/job:worker/replica:0/task:1/device:CPU:0'
            >>> replicator.Replicator(cluster.devices).num_replicas
            4
        """
        return self._devices

    @property
    def connected(self) -> bool:
        """Whether it was neither closed nor replaced by another connection.

        Example:
            >>> cluster.connected
            True
        """
        return _tf.connection() is self._token

    def host_of(self, device: str) -> str:
        """Returns the host that a device is on, as it was given.

        Example:
            >>> cluster.host_of(cluster.devices[2]) == addresses[1]
            True

        Args:
            device: One of `devices`.

        Raises:
            DeviceError: It is on none of the hosts.
        """
        try:
            spec = tf.DeviceSpec.from_string(device)
        except (ValueError, TypeError, AttributeError):
            spec = tf.DeviceSpec()
        if spec.job != state.WORKER or spec.task not in range(self.num_hosts):
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

        Example:
            >>> cluster.check()  # both are there

        Raises:
            HostLostError: Some are not, by their names.
            ClusterError: The connection was closed.
        """
        self._require("its hosts")
        problems = health.lost(self._hosts, self.heartbeat)
        if problems:
            raise errors.HostLostError(
                errors.compose(
                    f"{len(problems)} of {self.num_hosts} hosts are lost, with what "
                    "is on them; a step that was running may have been cut short.",
                    [
                        *health.told(self._hosts, problems),
                        f"at {errors.user_line()}",
                    ],
                    f"{health.START}; then connect again and restore a checkpoint.",
                ),
                tuple(h.name for h in self._hosts if h.address in problems),
            )

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Returns a block whose errors name lost hosts, as those of `repl.run` do.

        For what does not pass through a Replicator: tf.functions, eager reads and
        writes, checkpoints of TensorFlow's. Theirs is a tf.errors.UnavailableError.

        Example:
            >>> repl = replicator.Replicator(cluster.devices)
            >>> train = tf.function(lambda: repl.run(lambda: repl.all_reduce(1.0)))
            >>> with cluster.named():  # raises HostLostError if a host is lost
            ...     _ = train()

        Returns:
            A context manager.
        """
        return faults.named()

    def session_arguments(
        self, config: tf.compat.v1.ConfigProto | None = None
    ) -> dict[str, Any]:
        """Returns what a session of TensorFlow 1 is made with, to run on all hosts.

        Its master is this process: inputs that call Python run here, and files of
        Savers are here. What `tf.py_function` or `tf.numpy_function` call is not known
        on other hosts: put these under `tf.device("/job:master/task:0")`. Once a host
        is lost, `run` fails and `close` waits until its server is started again.

        Example:
            >>> repl = replicator.Replicator(cluster.devices)
            >>> arguments = cluster.session_arguments()
            >>> with tf.Graph().as_default():
            ...     sums = repl.run(lambda: repl.all_reduce(repl.replica_id))
            ...     with tf.compat.v1.Session(**arguments) as session:
            ...         print([int(x) for x in session.run(sums)])
            [6, 6, 6, 6]

        Monitored sessions call the first argument otherwise:

            >>> creator = tf.compat.v1.train.ChiefSessionCreator(
            ...     master=arguments["target"], config=arguments["config"]
            ... )

        Args:
            config: What the session's ConfigProto is to say besides.

        Returns:
            The arguments `target` and `config`.

        Raises:
            ArgumentError: `config` is none, or describes a cluster itself.
            ClusterError: The connection was closed.
        """
        self._require("session_arguments")
        return sessions.arguments(self._token, config)

    def checkpoint(
        self, directory: str | os.PathLike[str], *, keep: int = 3, **objects: Any
    ) -> checkpoints.Checkpoint:
        """Returns the checkpoints in a directory; restores the latest, if there is one.

        Example:
            >>> repl = replicator.Replicator(cluster.devices)
            >>> with repl.context():
            ...     v = tf.Variable(1.0)
            >>> checkpoint = cluster.checkpoint("saved", v=v, inputs=repl.inputs)
            >>> _ = checkpoint.save()

        Args:
            directory: Of this process; the hosts need not have it.
            keep: How many checkpoints are kept.
            **objects: What they hold: models, optimizers, variables; `repl.inputs` is
                the position of the inputs.

        Raises:
            ArgumentError: A checkpoint cannot hold one of these.
        """
        return checkpoints.Checkpoint(directory, objects, keep)

    def close(self) -> None:
        """Ends the connection; variables on the hosts are gone, the servers stay.

        Example:
            >>> cluster.close()
            >>> cluster.connected
            False

        Raises:
            ClusterError: A host is silent, which TensorFlow would wait for.
        """
        if self.connected:
            health.leave(self._hosts, health.lost(self._hosts, self.heartbeat))

    def _require(self, what: str) -> None:
        """Raises ClusterError if the connection was closed, or replaced.

        Args:
            what: What was asked for.
        """
        if not self.connected:
            raise errors.ClusterError(
                errors.compose(
                    f"{self!r} was asked for {what}.",
                    fix="connect again: cluster = replicator.connect().",
                )
            )

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
