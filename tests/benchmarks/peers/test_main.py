# SPDX-License-Identifier: Apache-2.0
"""Two replicas of a peer compute the same as its single device, if it is installed."""

import importlib.util

import pytest

from benchmarks.peers import __main__ as peers
from tests.benchmarks.helpers import refusal


@pytest.mark.parametrize(("framework", "module"), [("torch", "torch"), ("JAX", "jax")])
def test_two_replicas_compute_what_one_device_does(framework, module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is only in the environment of make bench-peers")
    measured = peers.cli.apart(
        "benchmarks.peers", f"--cell={framework}/small", "--quick"
    )
    losses = [one["losses"] for one in measured.values()]
    assert len(losses) > 1 and losses[0][-1] < losses[0][0]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_an_unknown_framework_is_refused():
    assert refusal(peers, only=["jax"]) == "error: unknown: jax; have torch, JAX"
