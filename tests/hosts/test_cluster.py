# SPDX-License-Identifier: Apache-2.0
"""What sessions on all hosts are made with, of what the connection is."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator import errors
from replicator.hosts import cluster

v1 = tf.compat.v1


def _connection(**jobs: Any) -> tf.train.ServerDef:
    return tf.train.ServerDef(
        cluster=tf.train.ClusterSpec(jobs).as_cluster_def(),
        job_name="client",
        task_index=0,
        protocol="grpc",
    )


HOSTS = {"worker": ["c:1", "a:2", "b:3"], "client": ["own:4"]}


def test_this_process_is_the_master_under_another_name_than_its_servers() -> None:
    made = cluster.arguments(_connection(**HOSTS), None)
    assert made["target"] == "grpc://own:4"
    found = tf.train.ClusterSpec(made["config"].cluster_def).as_dict()
    assert found == {"worker": HOSTS["worker"], "master": ["own:4"]}


def test_other_settings_are_kept_and_the_users_are_not_changed() -> None:
    config = v1.ConfigProto(allow_soft_placement=True, intra_op_parallelism_threads=3)
    before = config.SerializeToString()
    made = cluster.arguments(_connection(**HOSTS), config)["config"]
    assert made.allow_soft_placement and made.intra_op_parallelism_threads == 3
    assert config.SerializeToString() == before
    made.ClearField("cluster_def")
    assert made == config


@pytest.mark.parametrize("given", [None, False, True])
def test_ops_without_a_kernel_go_to_the_host_unless_a_config_decides(
    given: Any,
) -> None:
    config = None if given is None else v1.ConfigProto(allow_soft_placement=given)
    made = cluster.arguments(_connection(**HOSTS), config)["config"]
    assert made.allow_soft_placement == (given in (None, True))


def _with_hosts() -> Any:
    hosts = tf.train.ClusterSpec({"worker": ["z:9"]}).as_cluster_def()
    return v1.ConfigProto(cluster_def=hosts)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"allow_soft_placement": True}, "config={'allow_soft_placement': True}"),
        (_with_hosts(), "config=one with a cluster_def of its own"),
    ],
    ids=["no ConfigProto", "with hosts"],
)
def test_other_configurations_are_refused(config: Any, said: str) -> None:
    with pytest.raises(
        errors.ArgumentError, match=f"(?s){said}.*Fix: pass a tf.compat"
    ):
        cluster.arguments(_connection(**HOSTS), config)
