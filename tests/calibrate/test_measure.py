# SPDX-License-Identifier: Apache-2.0
"""The handling of measurements; their values depend on the machine."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from replicator.calibrate import measure
from replicator.costs import rates

DEVICES = [f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in range(3)]


def test_rates_are_finite_and_of_cpus() -> None:
    measured = measure.measure_rates(DEVICES, rounds=1, large=1 << 20)
    assert not measured.apart and measured.link == 0
    for seconds in (measured.op, measured.message, measured.add, measured.copy):
        assert 0 <= seconds < math.inf


def test_each_algorithm_is_measured() -> None:
    calibration = rates.Calibration()
    timing = measure.measure_algorithms(DEVICES, 1 << 10, 1, calibration)
    assert (timing.replicas, timing.nbytes) == (3, 1 << 10)
    assert list(timing.measured) == ["hub", "shuffled", "tree", "ring"]
    assert timing.none > 0 and min(timing.measured.values()) >= 0
    for name, seconds in timing.expected.items():
        assert seconds == calibration.seconds(name, "cpu", 3, 1 << 10)


def test_contenders_take_turns() -> None:
    calls = []

    def contender(name: str) -> Any:
        return lambda: calls.append(name) or tf.constant(0)

    seconds = measure.shortest({"a": contender("a"), "b": contender("b")}, 2)
    assert set(seconds) == {"a", "b"}
    turns = [name for k, name in enumerate(calls[2:]) if calls[k + 1] != name]
    assert calls[:2] == ["a", "b"] and turns == ["a", "b", "a", "b"]


def test_no_number_is_cut_off_where_there_is_no_terminal(capsys: Any) -> None:
    names = ("hub", "shuffled", "tree", "ring")
    seconds = dict.fromkeys(names, 123.456789)
    measure.show(
        rates.Calibration(), [measure.Timing(64, 1 << 40, 0.0, seconds, seconds)]
    )
    assert capsys.readouterr().out.count("123456.789 (123456.789)") == len(names)
