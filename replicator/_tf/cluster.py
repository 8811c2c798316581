# SPDX-License-Identifier: Apache-2.0
"""Connections to the servers of other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


def has_started() -> bool:
    """Whether TensorFlow has made its devices.

    Nothing public says so; calls that are too late once it has only raise.
    """
    existing = context.context_safe()
    return existing is not None and existing._initialized


def connect(
    jobs: Mapping[str, Mapping[int, str]], own_job: str, own_task: int, channels: int
) -> tf.train.ServerDef:
    """Makes the devices of these servers usable, in place of those of others.

    tf.config.experimental_connect_to_cluster starts a second server at this process's
    address where the hosts are others than before, and fails; and it takes no
    options for gRPC.

    Args:
        jobs: The addresses of each job's tasks.
        own_job: The job whose only task this process is, one of `jobs`.
        own_task: The number of that task.
        channels: How many connections there are to each server.

    Returns:
        What `connection` returns as long as this connection is the one there is.
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

    alone = server({own_job: jobs[own_job]})
    if running.get_server_def() is None:
        try:
            running.set_server_def(alone)
        except BaseException:
            running._server_def = None  # it was noted before it was tried
            raise
    made = server(jobs)
    try:
        running.update_server_def(made)
    except BaseException:
        running.update_server_def(alone)
        raise
    return made


def connection() -> Any:
    """Returns the tf.train.ServerDef of the connection there is, None if there is none.

    Public are only the devices, which do not say which connection they are of.
    """
    existing = context.context_safe()
    return None if existing is None else existing.get_server_def()


# --- Between-graph: each process has its own graph ------------------------------------


def join(addresses: Sequence[str], task: int, heartbeat: float, timeout: float) -> None:
    """Makes this process one of several that run collectives with one another.

    What MultiWorkerMirroredStrategy does for itself, with a heartbeat of our own; there
    is nothing public that does only this.

    Args:
        addresses: "host:port" of each process.
        task: Which of them this one is.
        heartbeat: Seconds of silence after which one counts as lost.
        timeout: Seconds to wait for all.
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
    """Returns which process this is of several, and the addresses of all.

    None: it did not join any.
    """
    made = joined_server()
    if made is None:
        return None
    spec = tf.train.ClusterSpec(made.cluster)
    return made.task_index, tuple(spec.job_tasks("worker"))


def joined_server() -> Any:
    """Returns the tf.train.ServerDef by which this process joined others, or None."""
    existing = context.context_safe()
    made = None if existing is None else existing._collective_ops_server_def
    if made is None:
        return None
    # Strategies of tf.distribute join others as well, and set no limit for that.
    told = made.default_session_config.experimental.coordination_config
    return made if told.cluster_register_timeout_in_ms else None


def abort_collectives(text: str) -> None:
    """Ends the collectives that wait in this process, and all later ones.

    TensorFlow ends them by itself where a connection breaks, but not where they wait
    for a process to begin, which the first one arranges.
    """
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, text)


def abort_everywhere(text: str) -> None:
    """Ends the collectives of all processes, and tells them why."""
    context.context().report_error_to_cluster(tf.errors.ABORTED, text)


def store_put(key: str, value: str) -> None:
    """Tells all processes a value, once per key."""
    context.context().set_config_key_value(key, value)


def store_get(key: str, seconds: float) -> str | None:
    """Returns what a process told, or None if none has by then."""
    try:
        return str(
            context.context().get_config_key_value(key, max(1, int(1000 * seconds)))
        )
    except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
        return None


def store_delete(key: str) -> None:
    """Takes back what was told."""
    context.context().delete_config_key_value(key)
