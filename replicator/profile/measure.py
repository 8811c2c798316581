# SPDX-License-Identifier: Apache-2.0
"""Measures a step on the available devices: as written, on one replica, and its ops.

A busy machine makes everything slower, but nothing faster. Therefore the time of a step
is the value that a twentieth of all steps stay below, over several rounds in which the
two programs take turns. For steps of a millisecond, the minimum would be luck.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator.calibrate import measure as calibrating
from replicator.costs import cost, rates, rehearsal, timed
from replicator.profile import parts, traces
from replicator.report.plan import Plan
from replicator.step.steps import Step

_WARM_UP = 3  # the first step builds
_ROUNDS = 5
_TRACED = 5  # steps
_EMPTY_CALLS = 50
_OF_ALL = 20  # one of so many steps is assumed to be undisturbed

# Creates a program: its step, as Replicator.build returns it.
Make = Callable[[], Step]


@dataclasses.dataclass
class MeasuredProgram:
    """A program's step and its measurements.

    Attributes:
        devices: `devices[r]` is where replica r runs.
        step: Runs a step.
        plan: The plan of the step.
        rehearsed: How it deviates from what the program says.
        times: The time of each step, in seconds.
        works: The processor time of this process during each step, in seconds.
    """

    devices: tuple[str, ...]
    step: Step
    plan: Plan
    rehearsed: rehearsal.Rehearsal
    times: list[float] = dataclasses.field(default_factory=list)
    works: list[float] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The time of an undisturbed step."""
        return _undisturbed(self.times)

    @property
    def work(self) -> float:
        """The processor time of an undisturbed step, in seconds."""
        return _undisturbed(self.works)

    def run(self) -> None:
        """Runs a step to completion; inputs that have ended start over."""
        with rehearsal.on(self.rehearsed):
            timed.run(self.step)

    def measure(self, count: int) -> None:
        """Runs steps and records the time of each."""
        for _ in range(count):
            work, start = time.process_time(), time.perf_counter()
            self.run()
            self.times.append(time.perf_counter() - start)
            self.works.append(time.process_time() - work)


def program(make: Make, rehearsed: rehearsal.Rehearsal) -> MeasuredProgram:
    """Creates a program, and runs its first steps.

    Args:
        make: Creates it.
        rehearsed: How it is to deviate from what the program says.
    """
    with rehearsal.on(rehearsed):
        step = make()
        new_program = MeasuredProgram(step.plan.devices, step, step.plan, rehearsed)
    for _ in range(_WARM_UP):
        new_program.run()
    return new_program


def _undisturbed(times: Sequence[float]) -> float:
    """Returns the time that a twentieth of all times stay below."""
    return sorted(times)[len(times) // _OF_ALL]


def alternate(
    programs: Sequence[MeasuredProgram], steps: int, rounds: int = _ROUNDS
) -> None:
    """Measures steps of several programs, which take turns.

    The first step of each turn is not measured: it brings the variables back into the
    caches.

    Args:
        programs: The programs.
        steps: The number of steps of each.
        rounds: The number of turns of each.
    """
    for n in range(rounds):
        first = n % len(programs)
        for contender in [*programs[first:], *programs[:first]]:
            contender.run()
            contender.measure(math.ceil(steps / rounds))


def whole(make: Make, strategy: Any = None) -> MeasuredProgram:
    """Creates a program as written.

    Args:
        make: Creates it.
        strategy: Replaces the program's own.
    """
    return program(make, rehearsal.Rehearsal(strategy=strategy))


def single_replica(make: Make, whole: MeasuredProgram) -> MeasuredProgram:
    """Creates a program with one replica, or returns it if it has only one.

    Args:
        make: Creates it.
        whole: The program as written.
    """
    num_replicas = len(whole.devices)
    if num_replicas == 1:
        return whole
    return program(make, rehearsal.Rehearsal(1, num_replicas, whole.rehearsed.strategy))


def measure(
    whole: MeasuredProgram,
    single: MeasuredProgram | None,
    steps: int,
    needs_all: str = "",
) -> tuple[parts.Measured, list[traces.Ran]]:
    """Measures a step and its parts.

    Args:
        whole: The program as written.
        single: The same with one replica; None if it does not run.
        steps: The number of measured steps of each.
        needs_all: Why it does not run with one replica.

    Returns:
        The measurement, and the ops that ran in some of the steps.
    """
    alternate([whole] if single is None or single is whole else [whole, single], steps)
    return parts_of(whole, single, needs_all)


def parts_of(
    whole: MeasuredProgram, single: MeasuredProgram | None, needs_all: str = ""
) -> tuple[parts.Measured, list[traces.Ran]]:
    """Traces steps of a measured program, and divides the time of a step.

    Args:
        whole: The program as written.
        single: As for `measure`.
        needs_all: As for `measure`.

    Returns:
        The measurement, and the ops that ran in the traced steps.
    """
    ran = traces.trace(whole.run, whole.plan, _TRACED, whole.rehearsed.ops_for_all)
    fixed = min(empty_call(), (single or whole).seconds / 2)
    cores = _cores(whole.devices)
    step_parts = parts.split(
        ran, whole.plan, whole.seconds - fixed, shared=cores is not None
    )
    measured = parts.Measured(
        devices=whole.devices,
        cores=cores,
        step=whole.seconds,
        alone=single.seconds if single else 0.0,
        work=single.work if single else 0.0,
        fixed=fixed,
        compute=step_parts.compute,
        communication=step_parts.communication,
        rows=tuple(whole.plan),
        once=step_parts.once,
        busy=min(1.0, whole.work / (cores * whole.seconds)) if cores else 1.0,
        spread=statistics.median(whole.times) / whole.seconds - 1,
        needs_all=needs_all,
    )
    return measured, ran


def calibrated(
    devices: Sequence[str], calibration: rates.Calibration
) -> tuple[rates.Calibration, str]:
    """Returns a calibration with rates for these devices, and their source.

    If there are several devices without rates, measures them, which takes seconds.

    Args:
        devices: Where the replicas run, by full names.
        calibration: The calibration as far as it exists.
    """
    kind = rates.kind_of(devices)
    if kind in calibration.rates:
        return calibration, "as calibrated"
    if kind == "hosts" or len(devices) < 2:
        return calibration, "by default"
    all_rates = {**calibration.rates, kind: calibrating.measure_rates(devices, _ROUNDS)}
    return dataclasses.replace(calibration, rates=all_rates), "measured just now"


def _cores(devices: Sequence[str]) -> int | None:
    """Returns the number of cores that replicas share; None if each has its device."""
    return len(os.sched_getaffinity(0)) if cost.share_memory(devices) else None


def empty_call() -> float:
    """Returns the seconds of a TensorFlow call that computes nothing."""
    function = tf.function(lambda: tf.zeros([])).get_concrete_function()
    times = []
    for _ in range(_EMPTY_CALLS):
        start = time.perf_counter()
        function().numpy()
        times.append(time.perf_counter() - start)
    return min(times)
