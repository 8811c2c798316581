# SPDX-License-Identifier: Apache-2.0
"""Peers train the networks that Replicator trains, and compute what one device does."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import cli, workloads
from benchmarks.peers import nets

_OURS = {workload.name: workload for workload in workloads.WORKLOADS}


@pytest.mark.parametrize(("framework", "module"), [("torch", "torch"), ("JAX", "jax")])
def test_two_replicas_compute_what_one_device_does(framework: str, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is only in the environment of make bench-peers")
    measured = cli.apart("benchmarks.peers", f"--cell={framework}/small", "--quick")
    losses = [one["losses"] for one in measured.values()]
    assert len(losses) > 1 and losses[0][-1] < losses[0][0]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("workload", nets.WORKLOADS, ids=lambda w: w.name)
def test_batches_are_those_of_our_own_workloads(workload: workloads.Workload) -> None:
    ours = _OURS[workload.name]
    assert workload.network == ours.network and workload.batch == ours.batch
    for part, own in zip(workload.parts(2), ours.parts(2), strict=True):
        for leaf, own_leaf in zip(part, own, strict=True):
            np.testing.assert_array_equal(leaf, own_leaf)


def test_nothing_of_the_peers_needs_tensorflow() -> None:
    code = (
        "import sys, benchmarks.peers.__main__; "
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras')))"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=cli.REPOSITORY).returncode == 0
