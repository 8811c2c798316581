# SPDX-License-Identifier: Apache-2.0
"""Random programs that write variables: components are equal, or the step is refused.

A failing program is shrunk, and printed as a step function.
"""

from __future__ import annotations

import collections

import pytest

from tests.programs import drawn
from tests.writes import program as p
from tests.writes import runner, strategies

_MIXED = strategies.Kind()
_RIGHT = strategies.Kind(verdicts=(p.RIGHT,), most=6)


def _check(kind: strategies.Kind, count: int, seed: int) -> collections.Counter[str]:
    """Checks `count` programs of a kind; returns the numbers of outcomes."""
    outcomes: collections.Counter[str] = collections.Counter()
    strategy = strategies.programs(kind)
    drawn.for_all(strategy, lambda one: runner.check(one, outcomes), count, seed)
    assert outcomes.total() >= count
    return outcomes


def test_right_programs() -> None:
    assert not _check(_RIGHT, 20, seed=0)["refused"]


def test_programs() -> None:
    outcomes = _check(_MIXED, 20, seed=0)
    assert outcomes["accepted"] and outcomes["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@pytest.mark.parametrize(
    "verdicts", [_MIXED.verdicts, _RIGHT.verdicts], ids=["mixed", "right"]
)
def test_many_programs(verdicts: tuple[str, ...], mode: str) -> None:
    kind = strategies.Kind(verdicts, mode, replicas=(2, 3), most=6)
    _check(kind, 60, seed=1)
