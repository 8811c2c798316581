# SPDX-License-Identifier: Apache-2.0
"""Checks many random programs of a kind, the same ones each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis

from tests.spmd import mismatches, runner, strategies

_Kind = strategies.Kind
_FEW = (2, 3)  # replicas, where gradients are built too
KINDS = {
    "eager": _Kind(),
    "function": _Kind(mode="function"),
    "session": _Kind(mode="session"),
    "tape": _Kind("tape", replicas=_FEW, budget=8),
    "tf.gradients": _Kind("tf.gradients", replicas=_FEW, budget=8),
    "gradients in sessions": _Kind("tape", "session", replicas=_FEW, budget=8),
}


def check_programs(kind: str, count: int, seed: int = 0) -> None:
    """Checks `count` programs of a kind, which is an entry of KINDS."""
    strategy = strategies.programs(KINDS[kind])
    assert for_all(strategy, runner.check, count, seed) >= count


def check_wrong_programs(kind: str, count: int, seed: int = 0) -> None:
    """Checks that `count` programs of a kind of changes.KINDS are refused."""
    strategy = mismatches.wrong_programs(kind)
    assert for_all(strategy, runner.check_refused, count, seed) >= count


def for_all(strategy: Any, check: Callable[[Any], None], count: int, seed: int) -> int:
    """Checks `count` programs, by the seed; returns how many were drawn."""
    checked = 0

    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.seed(seed)
    @hypothesis.given(strategy)
    def one(program: Any) -> None:
        nonlocal checked
        check(program)
        checked += 1

    one()
    return checked
