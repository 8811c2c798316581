# SPDX-License-Identifier: Apache-2.0
"""Reads the state of the connection from TensorFlow; this module keeps none."""

from __future__ import annotations

import os

import tensorflow as tf

from replicator import errors
from replicator._tf import cluster

# The jobs of connections that `connect` makes: the program, one of the programs in
# asynchronous mode, and the hosts' servers.
CLIENT, TRAINER, WORKER = "client", "trainer", "worker"
# The program within sessions: TensorFlow refuses a session in which a server has the
# name that it was started with.
MASTER = "master"
# TensorFlow reads this variable at each call. Unless it is false, eager calls to other
# hosts use a separate stream, where a step may overtake the write before it.
ORDERING = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"


def own_task() -> tf.DeviceSpec:
    """Returns the job, replica and task of this process without starting TensorFlow."""
    local = tf.DeviceSpec(job="localhost", replica=0, task=0)
    if not cluster.has_started() and cluster.connection() is None:
        return local
    with tf.init_scope():
        if not tf.executing_eagerly():
            return local
        with tf.device(None):
            spec = tf.DeviceSpec.from_string(tf.constant(0).device)
    return tf.DeviceSpec(job=spec.job, replica=spec.replica, task=spec.task)


def connected_hosts() -> tuple[str, ...]:
    """Returns the addresses of the hosts to which `connect` connected this process."""
    connection = cluster.connection()
    if connection is None or connection.job_name not in (CLIENT, TRAINER):
        return ()
    spec = tf.train.ClusterSpec(connection.cluster)
    return tuple(spec.job_tasks(WORKER)) if WORKER in spec.jobs else ()


def trainer() -> int | None:
    """Returns this program's number in asynchronous mode; None in the other modes."""
    connection = cluster.connection()
    return (
        connection.task_index
        if connection is not None and connection.job_name == TRAINER
        else None
    )


def own_address(connection: tf.train.ServerDef) -> str:
    """Returns the address at which this process listens.

    Args:
        connection: As `_tf.cluster.connection` returns it.
    """
    spec = tf.train.ClusterSpec(connection.cluster)
    return str(spec.task_address(connection.job_name, connection.task_index))


def order() -> None:
    """Makes eager writes on other hosts complete before the next step begins."""
    os.environ[ORDERING] = "false"


def refuse_unordered(device: str) -> None:
    """Refuses a device of another host if a step may overtake an eager write there.

    Args:
        device: The full name of the device.

    Raises:
        ClusterError: A step may overtake a write; `order` was not called.
    """
    if os.environ.get(ORDERING, "").lower() in ("false", "0"):
        return
    raise errors.ClusterError(
        f"{device} is on another host, and writes to variables there may be overtaken "
        "by the next step, which then reads old values.",
        fix="connect with replicator.connect(...) instead of "
        "tf.config.experimental_connect_to_cluster or _to_host, and run steps outside "
        "of tf.experimental.async_scope(); or set the environment variable "
        f"{ORDERING}=false.",
    )
