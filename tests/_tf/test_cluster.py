"""Connections to other hosts; what connect makes of them is in tests/cluster."""

from __future__ import annotations

import subprocess
import sys

import tensorflow as tf

from replicator import _tf
from tests.cluster import servers

_PROGRAM = """
import tensorflow as tf
from replicator import _tf
from replicator.cluster import addresses
assert not _tf.has_started()
assert _tf.connection() is None
port = addresses.free_port()
busy = tf.distribute.Server({"worker": ["127.0.0.1:0"]}, "worker", 0)
at = busy.target.removeprefix("grpc://")
try:
    _tf.connect({"client": [at]}, "client", 2)
except tf.errors.OpError as error:
    assert "Could not start gRPC server" in str(error), error
assert _tf.connection() is None, "as before"
jobs = {"client": [f"127.0.0.1:{port}"], "worker": [at]}
made = _tf.connect(jobs, "client", 2)
assert _tf.connection() is made and _tf.has_started()
assert made.default_session_config.rpc_options.num_channels_per_target == 2
names = [d.name for d in tf.config.list_logical_devices("CPU")]
assert names == [f"/job:{job}/replica:0/task:0/device:CPU:0" for job in jobs], names
alone = _tf.connect({"client": jobs["client"]}, "client", 2)
assert _tf.connection() is alone is not made
assert len(tf.config.list_logical_devices("CPU")) == 1
print("done", flush=True)
import os
os._exit(0)
"""


def test_this_process_has_started_and_is_not_connected():
    tf.constant(0)
    assert _tf.has_started()
    assert _tf.connection() is None


def test_connecting_again_and_to_nobody():
    """In a process of its own: `_tf.connect` is for good."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=servers.environment(),
        capture_output=True,
        text=True,
        timeout=servers.LIMIT,
    )
    assert done.stdout == "done\n", done.stderr[-4000:]
