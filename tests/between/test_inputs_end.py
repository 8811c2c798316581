# SPDX-License-Identifier: Apache-2.0
"""Inputs that end on one host first: the step ends on all, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

# The sums of both hosts in the steps of an epoch.
_STEPS: dict[str, list[Any]] = {
    "known": [0, 2, 4],
    "known, first": [0, 2, 4],
    "none": [],
    "unknown": [0, 2],
    "mixed": [0, 2],
    "equal": [0, 2, 4],
    "dealt": [1, 5, 9],  # the seventh element fills no round
    "split": [6, 15],
    "per worker": [0, 2],
}


@pytest.fixture(scope="module")
def found(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each host's results, by the kind of input."""
    return [results["input_ends"] for results in told]


@pytest.mark.parametrize("name", _STEPS)
def test_all_hosts_end_together(found: list[dict[str, Any]], name: str) -> None:
    sums = _STEPS[name]
    for own in found:
        # The variable counts the complete steps; a second epoch equals the first.
        assert own[name] == [[sums, len(sums)], [sums, 2 * len(sums)]]


def test_a_loop_of_steps_ends_within_a_call(found: list[dict[str, Any]]) -> None:
    """Two steps per call, of five: the fifth is done, and its call raises."""
    for own in found:
        assert own["loop"] == [[[[0, 2], [4, 6]], 5], [[[0, 2], [4, 6]], 10]]


def test_hosts_ask_only_where_it_is_not_certain(found: list[dict[str, Any]]) -> None:
    """Unequal and unknown lengths cost a gather; equal and endless ones do not."""
    for own in found:
        assert own["gathers"] == [1, 1, 0, 0, 0, 1]
