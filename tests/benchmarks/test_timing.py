# SPDX-License-Identifier: Apache-2.0
"""The measurement of contenders; no time is asserted."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import timing
from tests.benchmarks.helpers import as_dict, measured


def test_every_contender_gets_the_same_turns() -> None:
    calls: list[str] = []
    runs = {
        name: timing.in_turn(lambda name=name: calls.append(name) or 1.0)
        for name in "ab"
    }
    results = timing.measure(runs, steps=6, rounds=3, warm_up=2)
    assert calls.count("a") == calls.count("b") == 2 + 3 * (1 + 2)
    assert [len(one.rounds) for one in results.values()] == [3, 3]
    assert results["a"].losses == (1.0, 1.0)
    # Blocks of three steps, and the neighbours change.
    assert "".join(calls[4::3]) == "abbaab"
    few = timing.measure(runs, steps=2, rounds=20, warm_up=1)
    assert len(few["a"].rounds) == 2


def test_spread_is_the_middle_half_over_the_median() -> None:
    assert measured(2.0).spread == measured(2.0, 2.0, 2.0).spread == 0.0
    assert measured(1.0, 2.0, 3.0).spread == pytest.approx(0.5)


def test_a_ratio_is_the_median_over_the_rounds() -> None:
    # One round was disturbed, for both: its ratio is that of the others.
    assert timing.ratio(measured(2.0, 20.0, 2.0), measured(1.0, 10.0, 1.0)) == 2.0
    # The ratio of medians would be 1.
    assert timing.ratio(measured(1.0, 2.0, 3.0), measured(0.5, 1.0, 9.0)) == 2.0


def test_json_gives_back_what_was_measured() -> None:
    assert timing.Measured.from_json(as_dict(1.0, 2.0)) == measured(1.0, 2.0)


def test_contenders_agree_if_their_losses_do() -> None:
    losses = {"a": (2.0, 1.0), "b": (2.00001, 1.0), "c": (2.0, 1.1)}
    found = {
        name: dataclasses.replace(measured(1.0), losses=own)
        for name, own in losses.items()
    }
    assert timing.agree(found, ["a", "b"])
    assert not timing.agree(found, ["a", "c"])
    assert not timing.agree(found, ["a", "b", "c"])
