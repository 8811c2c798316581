# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow itself says of the connection there is; nothing is kept here."""

from __future__ import annotations

import os

import tensorflow as tf

from replicator import _tf, errors

# The jobs of a connection that `connect` made: the program, or in asynchronous mode one
# of the programs; and the hosts' servers.
CLIENT, TRAINER, WORKER = "client", "trainer", "worker"
# TensorFlow reads it at each call: whether eager calls on other hosts go out on a
# stream of their own, where a step may overtake the write before it.
ORDERING = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"


def own_task() -> tf.DeviceSpec:
    """Returns the job, replica and task of this process; does not start TensorFlow."""
    local = tf.DeviceSpec(job="localhost", replica=0, task=0)
    if not _tf.has_started() and _tf.connection() is None:
        return local
    with tf.init_scope():
        if not tf.executing_eagerly():
            return local
        with tf.device(None):
            spec = tf.DeviceSpec.from_string(tf.constant(0).device)
    return tf.DeviceSpec(job=spec.job, replica=spec.replica, task=spec.task)


def connected_hosts() -> tuple[str, ...]:
    """Returns the addresses of the hosts to which `connect` connected this process."""
    made = _tf.connection()
    if made is None or made.job_name not in (CLIENT, TRAINER):
        return ()
    spec = tf.train.ClusterSpec(made.cluster)
    return tuple(spec.job_tasks(WORKER)) if WORKER in spec.jobs else ()


def trainer() -> int | None:
    """Returns which program this is in asynchronous mode; None in the other modes."""
    made = _tf.connection()
    return made.task_index if made is not None and made.job_name == TRAINER else None


def own_address(connection: tf.train.ServerDef) -> str:
    """Returns where this process listens.

    Args:
        connection: As `_tf.connection` returns it.
    """
    spec = tf.train.ClusterSpec(connection.cluster)
    return str(spec.task_address(connection.job_name, connection.task_index))


def order() -> None:
    """Has eager writes on other hosts done before the next step begins."""
    os.environ[ORDERING] = "false"


def refuse_unordered(device: str) -> None:
    """Refuses a device of another host if a step may overtake an eager write there.

    Args:
        device: Its full name.

    Raises:
        ClusterError: It may.
    """
    if os.environ.get(ORDERING, "").lower() in ("false", "0"):
        return
    raise errors.ClusterError(
        errors.compose(
            f"{device} is on another host, and what is written to variables there may "
            "be overtaken by the next step, which then reads old values.",
            fix="connect by replicator.connect(...) in place of tf.config."
            "experimental_connect_to_cluster or _to_host, and run steps outside of "
            "tf.experimental.async_scope(); or set the environment variable "
            f"{ORDERING}=false.",
        )
    )
