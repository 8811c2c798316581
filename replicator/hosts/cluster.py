# SPDX-License-Identifier: Apache-2.0
"""`Cluster`: the hosts that this process is connected to, also for v1 sessions."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Sequence
from typing import Any, Self

import tensorflow as tf

from replicator import errors
from replicator._tf import cluster
from replicator.cluster import description, faults, health, state
from replicator.cluster.state import MASTER, WORKER
from replicator.hosts import checkpoints
from replicator.inputs import places


class Cluster:
    """The hosts that this process is connected to; returned by `replicator.connect`.

    As a context manager, it closes the connection on exit.

    Example:
        >>> with replicator.connect(addresses) as cluster:
        ...     repl = replicator.Replicator(cluster.devices)
        ...     print(cluster.num_hosts, "hosts,", repl.num_replicas, "replicas")
        2 hosts, 4 replicas

    Attributes:
        host_id: The number of this program among those that train together, one per
            host: 0 <= host_id < num_hosts. If one program runs on all hosts, it is 0.
        source: Where the hosts are described, e.g. "REPLICATOR_CLUSTER".
        heartbeat: How many seconds a host may be silent before it counts as lost.
    """

    host_id = 0

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
        """The hosts, as the user named them; host k is task k of the job "worker".

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
        """The full device name of each replica, host by host.

        These are all accelerators of all hosts, or all CPU devices if there are none.

        Example:
            >>> cluster.devices[2]
            '/job:worker/replica:0/task:1/device:CPU:0'
            >>> replicator.Replicator(cluster.devices).num_replicas
            4
        """
        return self._devices

    @property
    def connected(self) -> bool:
        """Whether the connection is open: neither closed nor replaced by another.

        Example:
            >>> cluster.connected
            True
        """
        return cluster.connection() is self._token

    def host_of(self, device: str) -> str:
        """Returns the host that a device is on, as the user named it.

        Example:
            >>> cluster.host_of(cluster.devices[2]) == addresses[1]
            True

        Args:
            device: One of `devices`.

        Raises:
            DeviceError: The device is on none of the hosts.
        """
        try:
            spec = tf.DeviceSpec.from_string(device)
        except (ValueError, TypeError, AttributeError):
            spec = tf.DeviceSpec()
        if spec.job != state.WORKER or spec.task not in range(self.num_hosts):
            raise errors.DeviceError(
                f"{errors.repr_of(device)} is on none of {', '.join(self.hosts)}.",
                fix="name a device as in cluster.devices.",
            )
        return self._hosts[spec.task].name

    def check(self) -> None:
        """Checks that all hosts answer and still hold this program's state.

        Takes milliseconds, or `heartbeat` seconds if a host is silent.

        Example:
            >>> cluster.check()  # both are there

        Raises:
            HostLostError: Hosts are lost; the error names them.
            ClusterError: The connection was closed.
        """
        self._require("its hosts")
        problems = health.lost(self._hosts, self.heartbeat)
        if problems:
            raise errors.HostLostError(
                errors.compose(
                    f"{len(problems)} of {self.num_hosts} hosts are lost, with "
                    "everything on them; a step that was running may have been cut "
                    "short.",
                    [
                        *health.describe(self._hosts, problems),
                        f"at {errors.user_line()}",
                    ],
                    f"{health.START}; then connect again and restore a checkpoint.",
                ),
                tuple(h.name for h in self._hosts if h.address in problems),
            )

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which errors name lost hosts, as those of `repl.run` do.

        For calls that bypass a Replicator: tf.functions, eager reads and writes, and
        TensorFlow's own checkpoints. These otherwise raise
        tf.errors.UnavailableError.

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
        """Returns the arguments for a TensorFlow 1 session that runs on all hosts.

        The session's master is this process: inputs that call Python run here, and
        Savers write their files here. Other hosts cannot call the Python functions of
        `tf.py_function` and `tf.numpy_function`, so place these ops under
        `tf.device("/job:master/task:0")`. Once a host is lost, `run` fails and `close`
        waits until the host's server is restarted.

        Example:
            >>> repl = replicator.Replicator(cluster.devices)
            >>> arguments = cluster.session_arguments()
            >>> with tf.Graph().as_default():
            ...     sums = repl.run(lambda: repl.all_reduce(repl.replica_id))
            ...     with tf.compat.v1.Session(**arguments) as session:
            ...         print([int(x) for x in session.run(sums)])
            [6, 6, 6, 6]

        Monitored sessions have another name for the first argument:

            >>> creator = tf.compat.v1.train.ChiefSessionCreator(
            ...     master=arguments["target"], config=arguments["config"]
            ... )

        Args:
            config: Further settings of the session; copied into its ConfigProto.

        Returns:
            The arguments `target` and `config`.

        Raises:
            ArgumentError: `config` is no ConfigProto, or describes a cluster itself.
            ClusterError: The connection was closed.
        """
        self._require("session_arguments")
        return arguments(self._token, config)

    def checkpoint(
        self, directory: str | os.PathLike[str], *, keep: int = 3, **objects: Any
    ) -> checkpoints.Checkpoint:
        """Manages checkpoints in a directory and restores the latest, if there is one.

        Example:
            >>> repl = replicator.Replicator(cluster.devices)
            >>> with repl.context():
            ...     v = tf.Variable(1.0)
            >>> checkpoint = cluster.checkpoint("saved", v=v, inputs=repl.inputs)
            >>> _ = checkpoint.save()

        Args:
            directory: A directory of this process; the hosts need not have it.
            keep: How many checkpoints to keep.
            **objects: The objects to save: models, optimizers, variables; and
                `repl.inputs`, the position of the inputs.

        Raises:
            ArgumentError: A checkpoint cannot hold one of the objects.
        """
        return checkpoints.Checkpoint(directory, objects, keep)

    def close(self) -> None:
        """Closes the connection; variables on the hosts are lost, the servers go on.

        Example:
            >>> cluster.close()
            >>> cluster.connected
            False

        Raises:
            ClusterError: A host is silent, and TensorFlow would wait for it.
        """
        if self.connected:
            health.leave(self._hosts, health.lost(self._hosts, self.heartbeat))

    def _require(self, purpose: str) -> None:
        """Raises ClusterError if the connection was closed or replaced.

        Args:
            purpose: What the caller needs the connection for, for the message.
        """
        if not self.connected:
            raise errors.ClusterError(
                f"{self!r} was asked for {purpose}.",
                fix="connect again: cluster = replicator.connect().",
            )

    def __enter__(self) -> Self:
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
            if error is None:  # the block's own error says more than this one
                raise

    def __repr__(self) -> str:
        state = "" if self.connected else ", closed"
        hosts = ", ".join(self.hosts)
        return f"<Cluster of {hosts}: {len(self._devices)} devices{state}>"


def arguments(connection: tf.train.ServerDef, config: Any) -> dict[str, Any]:
    """Returns the arguments of a session whose master is this process.

    Args:
        connection: As `_tf.cluster.connection` returns it.
        config: A ConfigProto with further settings for the session, or None.

    Raises:
        ArgumentError: `config` is neither, or already has a cluster_def.
    """
    if config is None:
        # Replicas request devices, not the user's code, which requests none.
        config = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    if not isinstance(config, tf.compat.v1.ConfigProto) or config.cluster_def.job:
        problem = "one with a cluster_def of its own"
        if not isinstance(config, tf.compat.v1.ConfigProto):
            problem = errors.repr_of(config)
        raise errors.ArgumentError(
            f"a session on all hosts was given config={problem}.",
            fix="pass a tf.compat.v1.ConfigProto without a cluster_def; the connection "
            "sets it.",
        )
    spec = tf.train.ClusterSpec(connection.cluster)
    master = state.own_address(connection)
    jobs = {WORKER: spec.job_tasks(WORKER), MASTER: [master]}
    session_config = tf.compat.v1.ConfigProto()
    session_config.CopyFrom(config)
    session_config.cluster_def.CopyFrom(tf.train.ClusterSpec(jobs).as_cluster_def())
    return {"target": f"grpc://{master}", "config": session_config}


def arguments_for(devices: Sequence[str], config: Any) -> dict[str, Any]:
    """Returns the arguments of a session that runs on these devices.

    Args:
        devices: The devices, perhaps of other hosts.
        config: A ConfigProto.

    Raises:
        ArgumentError: The devices are of other hosts, and `config` describes a cluster.
        HostLostError: One of these hosts is lost: TensorFlow would wait for it.
    """
    if places.of_program(devices) is None:
        return {"config": config}
    faults.require_all()
    return arguments(cluster.connection(), config)
