# SPDX-License-Identifier: Apache-2.0
"""The launcher with real servers: from the flags to a sum over hosts."""

from __future__ import annotations

import os
import pathlib

import pytest

import replicator
from tests.launch import sshd
from tests.launch.stub import Place, line_of

_ROOT = str(pathlib.Path(replicator.__file__).parent.parent)
_SUM = """
import sys
import replicator
import tensorflow as tf

cluster = replicator.connect()
repl = replicator.Replicator(cluster.devices)

def step_fn():
    return repl.all_reduce(tf.constant(10.0 ** repl.replica_id))

print("sum", float(repl.run(step_fn)), *cluster.hosts, flush=True)
"""


def _sums(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if line.startswith("sum")]


@pytest.mark.slow
def test_replicas_of_two_servers_add_up(place: Place) -> None:
    place.program(_SUM)
    result = place.launch(
        "--nnodes=2", "--nproc-per-node=2", "train.py", PYTHONPATH=_ROOT
    )
    assert result.returncode == 0, result.stderr
    assert _sums(result.stdout) == ["sum 1111.0 localhost-0 localhost-1"]


@pytest.mark.slow
@pytest.mark.parametrize("tunnel", [True, False])
def test_replicas_of_hosts_add_up(
    place: Place, remote: sshd.Server, tunnel: bool
) -> None:
    place.program(_SUM)
    hosts, *flags = remote.flags
    how = ["--tunnel"] if tunnel else []
    result = place.launch(
        f"{hosts},localhost", *flags, *how, "train.py", PYTHONPATH=_ROOT
    )
    assert result.returncode == 0, result.stderr
    assert _sums(result.stdout) == ["sum 111.0 127.0.0.2 localhost"]


@pytest.mark.slow
def test_a_server_that_is_killed_in_a_step(place: Place) -> None:
    place.program(
        _SUM + "print('ready', flush=True)\nwhile True:\n    repl.run(step_fn)\n"
    )
    with place.start(
        "--nnodes=2", "--max-restarts=0", "train.py", PYTHONPATH=_ROOT
    ) as started:
        line_of(started, "ready")
        os.kill(place.servers()[0], 9)
        _, stderr = started.communicate(timeout=120)
    assert started.returncode == 137
    assert "localhost-" in stderr
    assert "its server has ended: killed by SIGKILL" in stderr
    place.expect_nothing_left()
