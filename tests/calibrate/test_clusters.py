# SPDX-License-Identifier: Apache-2.0
"""Measurements of a cluster; here two servers on this machine."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from replicator.calibrate import clusters
from replicator.costs import hosts as places
from replicator.costs import rates
from tests import paper_hosts

_ROOT = pathlib.Path(__file__).parents[2]

# All-reduces by each algorithm and on the hosts themselves: the bits of the formula.
_PROGRAM = """
import functools
import numpy as np
import tensorflow as tf
import replicator

cluster = replicator.connect()
arrays = [np.random.RandomState(r).randn(50, 31).astype("f") for r in range(4)]
for algorithm in ("hub", "shuffled", "tree", "ring"):
    repl = replicator.Replicator(cluster.devices, algorithm=algorithm)
    with repl.context():
        variable = tf.Variable(tf.zeros([50, 31]))
    step = repl.build(
        lambda: repl.all_reduce(variable + arrays[repl.replica_id])
    )
    values = [value.numpy() for value in step()]
    assert len({value.tobytes() for value in values}) == 1, algorithm
    want = (arrays[0] + arrays[1]) + (arrays[2] + arrays[3])
    assert values[0].tobytes() == want.tobytes(), algorithm
    print(algorithm, step.plan[0].between, step.plan.slowest_link.seconds > 0)
cluster.close()
"""


@pytest.mark.parametrize("count", [2, 3, 8, 9, 64])
def test_each_host_has_a_link_that_is_measured(count: int) -> None:
    devices = paper_hosts.names(range(count))
    pairs = clusters.pairs(devices)
    assert len({frozenset(ends) for ends in pairs}) == len(pairs) <= max(28, count)
    assert {device for ends in pairs for device in ends} == set(devices)
    assert all(one != other for one, other in pairs)


def test_links_are_compared_by_what_a_message_takes() -> None:
    near = rates.Rates(0.0, 1e-3, 1e-9, 0.0, 0.0, True)
    far = rates.Rates(0.0, 1e-6, 1e-7, 0.0, 0.0, True)
    assert clusters.seconds(far) > clusters.seconds(near) > near.message


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    """Starts two servers of two CPUs each; yields the environment of a client."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, "-m", "replicator.serve", "--cpus=2"]
    servers = [
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        server_facts = [json.loads(server.stdout.readline()) for server in servers]
        described = {
            "version": 1,
            "source": "a test",
            "heartbeat": 60.0,
            "client": "127.0.0.1:0",
            "hosts": [
                {"name": f"host-{k}", "address": own["address"], "cpus": 2, "gpus": 0}
                for k, own in enumerate(server_facts)
            ],
        }
        yield {**environment, "REPLICATOR_CLUSTER": json.dumps(described)}
    finally:
        for server in servers:
            server.stdin.close()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            server.stdout.close()


def _run(
    environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
def test_a_cluster_is_measured(cluster: dict[str, str], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rates.json"
    arguments = ("--cluster", "--kibibytes=1,64", "--rounds=1", f"--output={path}")
    result = _run(cluster, "-m", "replicator.calibrate", *arguments)
    assert result.returncode == 0, result.stderr
    for shown in ("(cpu)", "(hosts)", "host-0 - host-1", "shuffled", "64.0 KiB"):
        assert shown in result.stdout
    read = rates.load(path)
    assert set(read.rates) == {"cpu", "hosts"}
    ends = frozenset(places.host_of(name) for name in paper_hosts.names((0, 1)))
    assert set(read.links) == {ends}
    assert read.of("hosts") == read.between(*ends)
    assert read.of("hosts").message > 0 and read.of("hosts").apart


@pytest.mark.slow
def test_all_reduces_between_servers(cluster: dict[str, str]) -> None:
    result = _run(cluster, "-c", _PROGRAM)
    assert result.returncode == 0, result.stderr
    bytes_between = 2 * 50 * 31 * 4
    assert result.stdout.split("\n")[:4] == [
        f"{name} {bytes_between} True" for name in ("hub", "shuffled", "tree", "ring")
    ]
