# SPDX-License-Identifier: Apache-2.0
"""Measures a step on the devices at hand: as it is, on one replica, and its ops.

A busy machine makes everything slower, but nothing faster: what a step takes is what a
twentieth of all steps stay below, in several rounds in which the two take turns. The
least of all would be luck where a step takes a millisecond.
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
from replicator.costs import cost, rates, rehearsal
from replicator.plan.plan import Plan
from replicator.profile import parts, traces
from replicator.replicator import Replicator
from replicator.step import timed

_WARM_UP = 3  # the first step builds
_ROUNDS = 5
_TRACED = 5  # steps
_EMPTY_CALLS = 50
_OF_ALL = 20  # times, one is taken to be undisturbed

# Makes a program anew: a Replicator, its step_fn and maybe its input_fn.
Make = Callable[[], tuple[Replicator, Sequence[Any]]]


@dataclasses.dataclass
class Program:
    """A program's step, and what was measured of it.

    Attributes:
        devices: `devices[r]` is where replica r runs.
        step: Runs a step.
        plan: What it communicates.
        rehearsed: How it is otherwise than it says.
        times: What each step took, in seconds.
        works: How long the cores of this process were busy meanwhile, in seconds.
    """

    devices: tuple[str, ...]
    step: Any
    plan: Plan
    rehearsed: rehearsal.Rehearsal
    times: list[float] = dataclasses.field(default_factory=list)
    works: list[float] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """What a step takes where nothing disturbs it."""
        return _undisturbed(self.times)

    @property
    def work(self) -> float:
        """How long the cores are busy in such a step, in seconds."""
        return _undisturbed(self.works)

    def run(self) -> None:
        """Runs a step, to its end; inputs that have ended start over."""
        with rehearsal.on(self.rehearsed):
            timed.run(self.step)

    def measure(self, count: int) -> None:
        """Runs steps and notes what each takes."""
        for _ in range(count):
            work, start = time.process_time(), time.perf_counter()
            self.run()
            self.times.append(time.perf_counter() - start)
            self.works.append(time.process_time() - work)


def program(make: Make, rehearsed: rehearsal.Rehearsal) -> Program:
    """Makes a program, and runs its first steps.

    Args:
        make: Makes it.
        rehearsed: How it is to be otherwise than it says.
    """
    with rehearsal.on(rehearsed):
        repl, functions = make()
        step = repl.build(*functions)
        made = Program(repl.devices, step, step.plan, rehearsed)
    for _ in range(_WARM_UP):
        made.run()
    return made


def _undisturbed(times: Sequence[float]) -> float:
    """Returns what a twentieth of all times stay below."""
    return sorted(times)[len(times) // _OF_ALL]


def alternate(programs: Sequence[Program], steps: int, rounds: int = _ROUNDS) -> None:
    """Measures steps of several programs, which take turns.

    The first step of each turn is not measured: it brings the variables back into the
    caches.

    Args:
        programs: The programs.
        steps: How many of each.
        rounds: How many turns each has.
    """
    for n in range(rounds):
        turn = n % len(programs)
        for own in [*programs[turn:], *programs[:turn]]:
            own.run()
            own.measure(math.ceil(steps / rounds))


def whole(make: Make, strategy: Any = None) -> Program:
    """Makes a program as it is.

    Args:
        make: Makes it.
        strategy: In place of the program's own.
    """
    return program(make, rehearsal.Rehearsal(strategy=strategy))


def alone(make: Make, found: Program) -> Program:
    """Makes a program with one replica; it is the same if it has no more.

    Args:
        make: Makes it.
        found: The program as it is.
    """
    named = len(found.devices)
    if named == 1:
        return found
    return program(make, rehearsal.Rehearsal(1, named, found.rehearsed.strategy))


def measure(
    found: Program, one: Program, steps: int
) -> tuple[parts.Measured, list[traces.Ran]]:
    """Measures a step and its parts.

    Args:
        found: The program as it is.
        one: The same with one replica.
        steps: How many steps of each are measured.

    Returns:
        What was measured, and the ops that ran in some of the steps.
    """
    alternate([found] if one is found else [found, one], steps)
    return parts_of(found, one)


def parts_of(found: Program, one: Program) -> tuple[parts.Measured, list[traces.Ran]]:
    """Traces some steps of a program, and divides what a step takes.

    Args:
        found: The program as it is, which was measured.
        one: The same with one replica.

    Returns:
        What was measured, and the ops that ran in the traced steps.
    """
    ran = traces.trace(found.run, found.plan, _TRACED, found.rehearsed.once)
    fixed = min(empty_call(), one.seconds / 2)
    cores = _cores(found.devices)
    divided = parts.split(
        ran, found.plan, found.seconds - fixed, shared=cores is not None
    )
    measured = parts.Measured(
        devices=found.devices,
        cores=cores,
        step=found.seconds,
        alone=one.seconds,
        work=one.work,
        fixed=fixed,
        compute=divided.compute,
        communication=divided.communication,
        rows=tuple(found.plan),
        once=divided.once,
        busy=min(1.0, found.work / (cores * found.seconds)) if cores else 1.0,
        spread=statistics.median(found.times) / found.seconds - 1,
    )
    return measured, ran


def calibrated(
    devices: Sequence[str], known: rates.Calibration
) -> tuple[rates.Calibration, str]:
    """Returns what work costs on these devices, and where that is from.

    It takes seconds to measure, where there are two of them and nobody has done it.

    Args:
        devices: Where the replicas run, by full names.
        known: What work costs, as far as it was measured before.
    """
    kind = rates.kind_of(devices)
    if kind in known.rates:
        return known, "as calibrated"
    if kind == "hosts" or len(devices) < 2:
        return known, "by default"
    found = {**known.rates, kind: calibrating.measure_rates(devices, _ROUNDS)}
    return dataclasses.replace(known, rates=found), "measured just now"


def _cores(devices: Sequence[str]) -> int | None:
    """Returns how many cores replicas share; None if each has a device of its own."""
    return len(os.sched_getaffinity(0)) if cost.share_memory(devices) else None


def empty_call() -> float:
    """Returns the seconds of a call of TensorFlow that computes nothing."""
    nothing = tf.function(lambda: tf.zeros([])).get_concrete_function()
    times = []
    for _ in range(_EMPTY_CALLS):
        start = time.perf_counter()
        nothing().numpy()
        times.append(time.perf_counter() - start)
    return min(times)
