# SPDX-License-Identifier: Apache-2.0
"""Strategies' bounds on programs that do not wait for one another."""

from __future__ import annotations

from typing import Any

import pytest

import replicator
from replicator import strategy
from replicator.hosts.asynchronous import bounds
from replicator.strategy import choosing


@pytest.mark.parametrize(
    ("given", "staleness"),
    [
        (None, None),
        (strategy.PS(sync=False), None),
        (strategy.PS(staleness=3), 3),
        (strategy.PSLoadBalancing(staleness=1), 1),
        ({"a": strategy.PS(staleness=3), ".*": strategy.PS(staleness=2)}, 2),
        ({"a": strategy.PS(staleness=3), ".*": strategy.PS(sync=False)}, 3),
    ],
)
def test_programs_are_as_near_as_the_nearest_rule(
    given: Any, staleness: int | None
) -> None:
    builder = None if given is None else choosing.as_builder(given)
    assert bounds.staleness(builder) == staleness


@pytest.mark.parametrize(
    "given",
    [
        strategy.PS(),
        strategy.AllReduce(),
        strategy.PartitionedPS(sync=False),
        {".*": strategy.Mirrored()},
    ],
)
def test_what_is_for_one_process_is_refused(given: Any) -> None:
    with pytest.raises(replicator.StrategyError, match=r"own speed(.|\n)*sync=False"):
        bounds.staleness(choosing.as_builder(given))
