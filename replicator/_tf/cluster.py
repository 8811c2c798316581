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
    jobs: Mapping[str, Sequence[str]], own_job: str, channels: int
) -> tf.train.ServerDef:
    """Makes the devices of these servers usable, in place of those of others.

    tf.config.experimental_connect_to_cluster starts a second server at this process's
    address where the hosts are others than before, and fails; and it takes no
    options for gRPC.

    Args:
        jobs: The addresses of each job's tasks.
        own_job: The job whose only task this process is, one of `jobs`.
        channels: How many connections there are to each server.

    Returns:
        What `connection` returns as long as this connection is the one there is.
    """
    running = context.context()
    running.ensure_initialized()
    config = running.config  # a copy
    config.rpc_options.num_channels_per_target = channels

    def server(jobs: Mapping[str, Sequence[str]]) -> tf.train.ServerDef:
        return tf.train.ServerDef(
            cluster=tf.train.ClusterSpec(jobs).as_cluster_def(),
            job_name=own_job,
            task_index=0,
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
