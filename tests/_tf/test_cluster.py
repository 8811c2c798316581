# SPDX-License-Identifier: Apache-2.0
"""Connections to other hosts; tests/cluster tests connect itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tensorflow as tf

from replicator._tf import cluster
from replicator.cluster import addresses
from tests.cluster import servers

_PROGRAM = """
import tensorflow as tf
from replicator._tf import cluster
from replicator.cluster import addresses
assert not cluster.has_started()
assert cluster.connection() is None
port = addresses.free_port()
busy = tf.distribute.Server({"worker": ["127.0.0.1:0"]}, "worker", 0)
at = busy.target.removeprefix("grpc://")
try:
    cluster.connect({"client": {0: at}}, "client", 0, 2)
except tf.errors.OpError as error:
    assert "Could not start gRPC server" in str(error), error
assert cluster.connection() is None, "as before"
jobs = {"client": {0: f"127.0.0.1:{port}"}, "worker": {0: at}}
made = cluster.connect(jobs, "client", 0, 2)
assert cluster.connection() is made and cluster.has_started()
assert made.default_session_config.rpc_options.num_channels_per_target == 2
names = [d.name for d in tf.config.list_logical_devices("CPU")]
assert names == [f"/job:{job}/replica:0/task:0/device:CPU:0" for job in jobs], names
alone = cluster.connect({"client": jobs["client"]}, "client", 0, 2)
assert cluster.connection() is alone is not made
assert len(tf.config.list_logical_devices("CPU")) == 1
print("done", flush=True)
import os
os._exit(0)
"""


def test_this_process_has_started_and_is_neither_connected_nor_joined():
    tf.constant(0)
    assert cluster.has_started()
    assert cluster.connection() is None
    assert cluster.joined() is None and cluster.joined_server() is None


def test_connecting_again_and_to_nobody():
    """In a process of its own: `cluster.connect` cannot be undone."""
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=servers.environment(),
        capture_output=True,
        text=True,
        timeout=servers.LIMIT,
    )
    assert result.stdout == "done\n", result.stderr[-4000:]


_JOINED = """
import sys
import tensorflow as tf
from replicator._tf import cluster
task, addresses = int(sys.argv[1]), sys.argv[2:]
assert cluster.joined() is None and cluster.joined_server() is None
cluster.join(addresses, task, 10.0, 60.0)
assert cluster.joined() == (task, tuple(addresses))
assert tf.constant(1).device == f"/job:worker/replica:0/task:{task}/device:CPU:0"
assert cluster.store_get("nobody tells", 0.1) is None
cluster.store_put(f"told by {task}", f"value {task}")
values = [cluster.store_get(f"told by {k}", 60.0) for k in (0, 1)]
assert values == ["value 0", "value 1"]
keys = {"group_size": 2, "group_key": 1, "ordering_token": []}
x = tf.raw_ops.CollectiveGatherV2(input=[task], instance_key=1, **keys)
assert sorted(x.numpy()) == [0, 1], x
assert cluster.joined_server().task_index == task
cluster.store_delete(f"told by {task}")
assert cluster.store_get(f"told by {task}", 0.1) is None
cluster.store_put(f"waits {task}", "")
cluster.store_get(f"waits {1 - task}", 60.0)
if task:
    cluster.abort_all_processes("this host failed")
try:
    tf.raw_ops.CollectiveGatherV2(input=[task], instance_key=2, **keys)
except tf.errors.AbortedError as error:
    assert "this host failed" in str(error)
cluster.abort_collectives("again")
try:
    tf.raw_ops.CollectiveGatherV2(input=[task], instance_key=3, **keys)
except tf.errors.OpError as error:
    assert "Collective ops is aborted" in str(error)
else:
    raise AssertionError
print("done", flush=True)
"""


@pytest.mark.slow
def test_processes_join():
    ports = [addresses.free_port() for _ in range(2)]
    listed = [f"127.0.0.1:{port}" for port in ports]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _JOINED, str(task), *listed],
            env=servers.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in (0, 1)
    ]
    for process in started:
        out, errors = process.communicate(timeout=servers.LIMIT)
        assert (process.returncode, out) == (0, "done\n"), errors[-4000:]
