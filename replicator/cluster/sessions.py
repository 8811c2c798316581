# SPDX-License-Identifier: Apache-2.0
"""What a session of TensorFlow 1 is made with, to run on all hosts of a connection."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster import state
from replicator.cluster.state import WORKER

# This process' server is started as the job "client", the hosts' as one of their own.
# A session is refused in which a server has the name that it was started with.
_MASTER = "master"


def arguments(connection: tf.train.ServerDef, config: Any) -> dict[str, Any]:
    """Returns the arguments of a session whose master is this process.

    Args:
        connection: As `_tf.connection` returns it.
        config: A ConfigProto that the session's is to follow, or None.

    Raises:
        ArgumentError: `config` is something else, or names jobs of its own.
    """
    if config is None:
        config = tf.compat.v1.ConfigProto()
    if not isinstance(config, tf.compat.v1.ConfigProto) or config.cluster_def.job:
        what = "one with a cluster_def of its own"
        if not isinstance(config, tf.compat.v1.ConfigProto):
            what = errors.shown(config)
        raise errors.ArgumentError(
            errors.compose(
                f"session_arguments was given config={what}.",
                fix="pass a tf.compat.v1.ConfigProto without a cluster_def, which is "
                "that of the connection.",
            )
        )
    spec = tf.train.ClusterSpec(connection.cluster)
    own = state.own_address(connection)
    jobs = {WORKER: spec.job_tasks(WORKER), _MASTER: [own]}
    made = tf.compat.v1.ConfigProto()
    made.CopyFrom(config)
    made.cluster_def.CopyFrom(tf.train.ClusterSpec(jobs).as_cluster_def())
    return {"target": f"grpc://{own}", "config": made}
