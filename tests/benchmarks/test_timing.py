# SPDX-License-Identifier: Apache-2.0
"""The measurement of contenders; no time is asserted."""

import dataclasses
import json

import pytest

from benchmarks import timing
from tests.benchmarks.helpers import measured


def test_measure_gives_every_contender_the_same_turns():
    calls = []
    runs = {
        name: timing.in_turn(lambda name=name: calls.append(name) or 1.0)
        for name in "ab"
    }
    results = timing.measure(runs, steps=6, rounds=3, warm_up=2)
    assert calls.count("a") == calls.count("b") == 2 + 3 * (1 + 2)
    assert [len(one.rounds) for one in results.values()] == [3, 3]
    assert results["a"].losses == (1.0, 1.0)
    # Blocks of three steps, and the neighbours change.
    blocks = "".join(calls[4::3])
    assert blocks == "abbaab"


def test_there_are_no_more_rounds_than_steps():
    runs = {"a": timing.in_turn(lambda: 1.0)}
    assert len(timing.measure(runs, steps=2, rounds=20, warm_up=1)["a"].rounds) == 2


@pytest.mark.parametrize(
    ("rounds", "spread"),
    [((2.0,), 0.0), ((2.0, 2.0, 2.0), 0.0), ((1.0, 2.0, 3.0), 0.5)],
)
def test_spread_is_the_middle_half_over_the_median(rounds, spread):
    assert measured(*rounds).spread == pytest.approx(spread)


def test_a_ratio_is_the_median_over_the_rounds():
    # One round was disturbed, for both: its ratio is that of the others.
    assert timing.ratio(measured(2.0, 20.0, 2.0), measured(1.0, 10.0, 1.0)) == 2.0
    # The ratio of medians would be 1.
    assert timing.ratio(measured(1.0, 2.0, 3.0), measured(0.5, 1.0, 9.0)) == 2.0


def test_json_gives_back_what_was_measured():
    one = measured(1.0, 2.0)
    assert (
        timing.Measured.from_json(json.loads(json.dumps(dataclasses.asdict(one))))
        == one
    )


def test_contenders_agree_if_their_losses_do():
    def with_losses(*losses):
        return dataclasses.replace(measured(1.0), losses=losses)

    measurements = {
        "a": with_losses(2.0, 1.0),
        "b": with_losses(2.00001, 1.0),
        "c": with_losses(2.0, 1.1),
    }
    assert timing.agree(measurements, ["a", "b"])
    assert not timing.agree(measurements, ["a", "c"])
    assert not timing.agree(measurements, ["a", "b", "c"])
