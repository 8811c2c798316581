# SPDX-License-Identifier: Apache-2.0
"""What a strategy's variables cost together."""

from __future__ import annotations

import pytest

from replicator.costs.rates import KINDS, Calibration, Rates
from replicator.strategy import AllReduceSynchronizer, Node, PSSynchronizer, Resources
from replicator.strategy.predictions import (
    Assumed,
    predicted_together,
    step_seconds,
)
from tests import paper_hosts

HOSTS = tuple(paper_hosts.names((0, 1)))  # two, with one replica each
# Only messages cost: one second each.
RATES = Rates(op=0.0, message=1.0, link=0.0, add=0.0, copy=0.0, apart=False)
RESOURCES = Resources(HOSTS, calibration=Calibration(dict.fromkeys(KINDS, RATES)))
RING = AllReduceSynchronizer("RING")


def _messages(*nodes: Node, sparse: bool = False) -> float:
    known = [(sparse, Assumed())] * len(nodes)
    return step_seconds(predicted_together(nodes, RESOURCES, known))


def _mirrored(name: str, rows: int) -> Node:
    return Node(name, RING, shape=(rows, 1), dtype="float32")


@pytest.mark.parametrize("sparse", [False, True])
def test_small_gradients_send_one_message_together(sparse: bool) -> None:
    """As many as a large one, which travels alone."""
    full = _messages(_mirrored("v", 10**8), sparse=sparse)
    assert full > 1.0
    for count in (1, 2, 10):
        small = [_mirrored(f"v{n}", 100) for n in range(count)]
        assert _messages(*small, sparse=sparse) == pytest.approx(full)
    large = _mirrored("large", 10**8)
    alone = _messages(large, sparse=sparse)
    both = _messages(large, _mirrored("small", 100), sparse=sparse)
    assert alone == full < both < 1.01 * full


def test_gradients_that_travel_in_different_ways_share_no_message() -> None:
    owned = [
        Node(f"o{n}", PSSynchronizer(HOSTS[n]), shape=(3,), dtype="float32")
        for n in range(2)
    ]
    # Each gradient goes to its owner, and each value comes back.
    assert _messages(*owned) == 4.0
    small = _mirrored("v", 100)
    assert _messages(*owned, small) == pytest.approx(4.0 + _messages(small))
    parts = Node.in_parts("p", 0, [2, 1], [PSSynchronizer(name) for name in HOSTS])
    parts = Node("p", parts=parts.parts, axis=0, sizes=(2, 1), shape=(3,), dtype="int8")
    assert _messages(parts) == 2.0  # both at the same time
