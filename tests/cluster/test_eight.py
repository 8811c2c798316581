# SPDX-License-Identifier: Apache-2.0
"""Eight processes on this machine train as one device does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.between import processes
from tests.cluster import digits, servers

pytestmark = pytest.mark.slow
_LIMIT = 900  # seconds; all of them start at once


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[np.ndarray]]:
    """The losses and the weights of one device."""
    losses, weights = digits.plain()
    assert losses[-1] < 0.5 * losses[0]  # it learns
    return losses, weights


def _check(found: Sequence[dict[str, Any]], plain: Any) -> None:
    """Fails unless all processes have the results of one device, and the same bits."""
    losses, weights = plain
    bits = [fingerprint for part in found for fingerprint in part["bits"]]
    assert len(bits) == 8
    assert len({*bits}) == 1
    for part in found:
        assert part["replicas"] == 8
        assert part["losses"] == found[0]["losses"]
        np.testing.assert_allclose(part["losses"], losses, rtol=0, atol=1e-5)
        for own, one in zip(part["weights"], weights, strict=True):
            np.testing.assert_allclose(own, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cpus", [[1] * 8, [2] * 4], ids=["8x1", "4x2"])
def test_programs(cpus: list[int], plain: Any) -> None:
    _check(processes.run("digits", cpus, limit=_LIMIT), plain)


def test_servers(plain: Any) -> None:
    with servers.serving(8, "--cpus=1") as server_facts:
        result = servers.run_module(
            "tests.cluster.digits", *servers.addresses(server_facts), limit=_LIMIT
        )
    _check([json.loads(result.stdout.splitlines()[-1])], plain)
