# SPDX-License-Identifier: Apache-2.0
"""The results derived from measured times, and the sources of device rates."""

from __future__ import annotations

import random
from typing import Any

import tensorflow as tf

from replicator.costs import rates, rehearsal
from replicator.profile import measure

_CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{k}" for k in range(2)]
_HOSTS = [f"/job:worker/replica:0/task:{k}/device:CPU:0" for k in range(2)]
_OWN = rates.Rates(1e-6, 2e-6, 0.0, 3e-11, 4e-11, False)


def _program(times: list[float]) -> measure.MeasuredProgram:
    step: Any = lambda: tf.constant(0.0)  # noqa: E731
    plan: Any = ()
    measured_program = measure.MeasuredProgram(
        ("CPU:0",), step, plan, rehearsal.Rehearsal()
    )
    measured_program.times.extend(times)
    measured_program.works.extend(2 * seconds for seconds in times)
    return measured_program


def test_neither_a_lucky_step_nor_most_that_were_disturbed_count() -> None:
    steps = [0.1] + [1.0] * 10 + [5.0] * 89
    random.Random(0).shuffle(steps)
    program = _program(steps)
    assert (program.seconds, program.work) == (1.0, 2.0)
    assert _program([0.3]).seconds == 0.3


def test_rates_that_were_calibrated_are_taken() -> None:
    calibration = rates.Calibration({"cpu": _OWN})
    assert measure.calibrated(_CPUS, calibration) == (calibration, "as calibrated")


def test_rates_are_measured_where_there_are_two_devices_and_nobody_has() -> None:
    defaults = rates.Calibration({"hosts": _OWN}, {frozenset("ab"): _OWN})
    calibration, source = measure.calibrated(_CPUS, defaults)
    assert source == "measured just now"
    measured = calibration.of("cpu")  # on a busy machine, a difference may be zero
    assert measured.op >= 0 and measured.link == 0 and not measured.apart
    assert measured != rates.Calibration().of("cpu")
    assert calibration.of("hosts") == _OWN and calibration.links == defaults.links
    for devices in (_CPUS[:1], _HOSTS):
        assert measure.calibrated(devices, rates.Calibration())[1] == "by default"
