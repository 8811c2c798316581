# SPDX-License-Identifier: Apache-2.0
"""A YAML file of one host describes this one; several hosts need a connection."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.autodist import resources
from replicator.strategy import PSLoadBalancing

ONE = "nodes: [{address: localhost, cpus: [0, 2]}]"
TWO = """
nodes:
  - {address: 10.0.0.1, chief: true, cpus: [0, 1]}
  - {address: 10.0.0.2, ssh_config: others}
ssh: {others: {username: me}}
"""


def _written(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "resources.yml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", [str, pathlib.Path, replicator.ResourceSpec])
def test_one_host_is_this_one(kind, tmp_path):
    resource = kind(_written(tmp_path, ONE))
    autodist = replicator.AutoDist(resource, PSLoadBalancing())
    assert [name[-5:] for name in autodist.replicator.devices] == ["CPU:0", "CPU:2"]
    with autodist.scope():
        w = tf.Variable([1.0, 2.0])

    @autodist.function
    def loss(x):
        return tf.reduce_mean(x * w)

    np.testing.assert_allclose(loss(np.float32([[1, 2], [3, 4], [5, 6]])), 5.5)


@pytest.mark.parametrize(
    ("address", "is_told"),
    [("10.0.0.1", True), ("other:7777", True), ("127.0.0.1:7777", False)],
)
def test_one_host_that_is_another_is_told(address, is_told, tmp_path, caplog):
    path = _written(tmp_path, f"nodes: [{{address: '{address}', cpus: [0, 1]}}]")
    assert resources.devices_of(path) == ["CPU:0", "CPU:1"]
    assert ("resources.yml lists only " + address in caplog.text) == is_told
    assert ("call replicator.connect with the file" in caplog.text) == is_told


def test_a_device_that_this_host_lacks_is_named(tmp_path):
    path = _written(tmp_path, "nodes: [{address: localhost, gpus: [7]}]")
    with pytest.raises(replicator.DeviceError, match=r"(?s)GPU:7 does not exist.*Fix"):
        replicator.AutoDist(path)


def test_several_hosts_have_to_be_connected_to(tmp_path):
    path = _written(tmp_path, TWO)
    with pytest.raises(replicator.ClusterError) as raised:
        replicator.AutoDist(path, PSLoadBalancing())
    message = str(raised.value)
    assert "resources.yml lists 10.0.0.1:8888, 10.0.0.2:8888, but" in message
    assert "connected to no host" in message and "call replicator.connect" in message


def test_hosts_are_the_tasks_of_a_connection(tmp_path, monkeypatch):
    spec = replicator.ResourceSpec(_written(tmp_path, TWO))
    monkeypatch.setattr(
        resources.state, "connected_hosts", lambda: ("10.0.0.1:8888", "10.0.0.2:8888")
    )
    at = "/job:worker/replica:0/task:{}/device:CPU:{}"
    expected = [at.format(*place) for place in ((0, 0), (0, 1), (1, 0))]
    assert resources.devices_of(spec) == expected
    monkeypatch.setattr(resources.state, "connected_hosts", lambda: ("a:1", "b:1"))
    with pytest.raises(replicator.ClusterError, match="is connected to a:1, b:1"):
        resources.devices_of(spec)
