# SPDX-License-Identifier: Apache-2.0
"""Arguments for TensorFlow 1 sessions that run on all hosts of a connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import cluster
from replicator.cluster import faults, state
from replicator.cluster.state import MASTER, WORKER
from replicator.inputs import places


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
