# SPDX-License-Identifier: Apache-2.0
"""Connections to the servers of other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


def has_started() -> bool:
    """Whether TensorFlow has initialized its devices.

    The public API does not tell; calls that come too late merely raise.
    """
    existing = context.context_safe()
    return existing is not None and existing._initialized


def connect(
    jobs: Mapping[str, Mapping[int, str]], own_job: str, own_task: int, channels: int
) -> tf.train.ServerDef:
    """Makes the devices of these servers usable, in place of those connected before.

    Where the hosts have changed, tf.config.experimental_connect_to_cluster starts a
    second server at this process's address and fails; it also takes no gRPC options.

    Args:
        jobs: The addresses of each job's tasks.
        own_job: The job whose only task is this process, one of `jobs`.
        own_task: The number of that task.
        channels: The number of connections to each server.

    Returns:
        The connection's ServerDef, which `connection` returns while it is current.
    """
    running = context.context()
    running.ensure_initialized()
    config = running.config  # a copy
    config.rpc_options.num_channels_per_target = channels

    def server(jobs: Mapping[str, Mapping[int, str]]) -> tf.train.ServerDef:
        return tf.train.ServerDef(
            cluster=tf.train.ClusterSpec(jobs).as_cluster_def(),
            job_name=own_job,
            task_index=own_task,
            protocol="grpc",
            default_session_config=config,
        )

    single_job = server({own_job: jobs[own_job]})
    if running.get_server_def() is None:
        try:
            running.set_server_def(single_job)
        except BaseException:
            running._server_def = None  # TensorFlow sets it before it connects
            raise
    server_def = server(jobs)
    try:
        running.update_server_def(server_def)
    except BaseException:
        running.update_server_def(single_job)
        raise
    return server_def


def connection() -> Any:
    """Returns the tf.train.ServerDef of the current connection, or None.

    Only the devices are public, and they do not say which connection they belong to.
    """
    existing = context.context_safe()
    return None if existing is None else existing.get_server_def()


# --- Between-graph: each process has its own graph ------------------------------------


def join(addresses: Sequence[str], task: int, heartbeat: float, timeout: float) -> None:
    """Lets this process run collectives with others.

    MultiWorkerMirroredStrategy does this for itself; here the heartbeat is
    configurable. No public call does only this.

    Args:
        addresses: "host:port" of each process.
        task: The index of this process among them.
        heartbeat: Seconds of silence after which a process counts as lost.
        timeout: Seconds to wait until all have joined.
    """
    running = context.context()
    leader = "/job:worker/replica:0/task:0"
    jobs = tf.compat.v1.ConfigProto().experimental.coordination_config
    jobs.coordinated_job_list.add(name="worker", num_tasks=len(addresses))
    running.configure_collective_ops(
        collective_leader=leader,
        scoped_allocator_enabled_ops=(),
        device_filters=(f"/job:worker/task:{task}",),
    )
    running.configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        cluster_register_timeout_in_ms=int(1000 * timeout),
        heartbeat_timeout_in_ms=int(1000 * heartbeat),
        coordinated_jobs=list(jobs.coordinated_job_list),
    )
    server = tf.train.ServerDef(
        cluster=tf.train.ClusterSpec({"worker": addresses}).as_cluster_def(),
        job_name="worker",
        task_index=task,
        protocol="grpc",
        default_session_config=running.config,
    )
    running.enable_collective_ops(server)
    running.ensure_initialized()


def joined() -> tuple[int, tuple[str, ...]] | None:
    """Returns this process's index in its group and the addresses of all members.

    None if it has not joined a group.
    """
    server_def = joined_server()
    if server_def is None:
        return None
    spec = tf.train.ClusterSpec(server_def.cluster)
    return server_def.task_index, tuple(spec.job_tasks("worker"))


def joined_server() -> Any:
    """Returns the tf.train.ServerDef by which this process joined a group, or None."""
    existing = context.context_safe()
    server_def = None if existing is None else existing._collective_ops_server_def
    if server_def is None:
        return None
    # tf.distribute's strategies join groups as well, but set no timeout.
    coordination = server_def.default_session_config.experimental.coordination_config
    return server_def if coordination.cluster_register_timeout_in_ms else None


def abort_collectives(text: str) -> None:
    """Aborts the collectives waiting in this process, and all later ones.

    TensorFlow aborts them itself when a connection breaks, but not while they wait for
    a process to start, which the first process coordinates.
    """
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, text)


def abort_all_processes(text: str) -> None:
    """Aborts the collectives of all processes, with a text that says why."""
    context.context().report_error_to_cluster(tf.errors.ABORTED, text)


def store_put(key: str, value: str) -> None:
    """Publishes a value to all processes, once per key."""
    context.context().set_config_key_value(key, value)


def store_get(key: str, seconds: float) -> str | None:
    """Returns the value published under a key, or None if there is none in time."""
    try:
        return str(
            context.context().get_config_key_value(key, max(1, int(1000 * seconds)))
        )
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return None


def store_delete(key: str) -> None:
    """Removes a key's value."""
    context.context().delete_config_key_value(key)
