# SPDX-License-Identifier: Apache-2.0
"""Measures a step on the devices at hand: as it is, on one replica, and its ops.

A busy machine makes everything slower, but nothing faster: each time is the least of
several rounds, in which the two take turns.
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

from replicator.costs import cost, rehearsal
from replicator.plan.plan import Plan
from replicator.profile import parts, traces
from replicator.replicator import Replicator

_WARM_UP = 3  # the first step builds
_ROUNDS = 5
_TRACED = 5  # steps
_EMPTY_CALLS = 50

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
        """What a step takes at least."""
        return min(self.times)

    def run(self) -> None:
        """Runs a step, to its end; inputs that have ended start over."""
        with rehearsal.on(self.rehearsed):
            for last in (False, True):
                try:
                    outputs = self.step()
                    break
                except tf.errors.OutOfRangeError:
                    if last:
                        raise
                    self.step.initialize()
            for tensor in tf.nest.flatten(outputs, expand_composites=True):
                if isinstance(tensor, tf.Tensor):
                    tensor.numpy()  # waits for it

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


def alternate(programs: Sequence[Program], steps: int, rounds: int = _ROUNDS) -> None:
    """Measures steps of several programs, which take turns.

    Args:
        programs: The programs.
        steps: How many of each.
        rounds: How many turns each has.
    """
    for n in range(rounds):
        turn = n % len(programs)
        for own in [*programs[turn:], *programs[:turn]]:
            own.measure(math.ceil(steps / rounds))


def measure(
    make: Make, steps: int, strategy: Any = None
) -> tuple[parts.Measured, list[traces.Ran]]:
    """Measures a step and its parts.

    Args:
        make: Makes the program.
        steps: How many steps are measured.
        strategy: In place of the program's own.

    Returns:
        What was measured, and the ops that ran in some of the steps.
    """
    whole, alone = both(make, strategy)
    alternate([whole] if alone is whole else [whole, alone], steps)
    return parts_of(whole, alone)


def both(make: Make, strategy: Any = None) -> tuple[Program, Program]:
    """Makes a program as it is, and with one replica; they are the same if it has one.

    Args:
        make: Makes it.
        strategy: In place of the program's own.
    """
    whole = program(make, rehearsal.Rehearsal(strategy=strategy))
    named = len(whole.devices)
    if named == 1:
        return whole, whole
    return whole, program(make, rehearsal.Rehearsal(1, named, strategy))


def parts_of(whole: Program, alone: Program) -> tuple[parts.Measured, list[traces.Ran]]:
    """Traces some steps of a program, and divides what a step takes.

    Args:
        whole: The program as it is, which was measured.
        alone: The same with one replica.

    Returns:
        What was measured, and the ops that ran in the traced steps.
    """
    ran = traces.trace(whole.run, whole.plan, _TRACED)
    fixed = min(empty_call(), alone.seconds / 2)
    shared = cost.share_memory(whole.devices)
    compute, communication = parts.split(ran, whole.plan, whole.seconds - fixed, shared)
    measured = parts.Measured(
        devices=whole.devices,
        cores=len(os.sched_getaffinity(0)) if shared else None,
        step=whole.seconds,
        alone=alone.seconds,
        work=statistics.median(alone.works),
        fixed=fixed,
        compute=compute,
        communication=communication,
        rows=tuple(whole.plan),
    )
    return measured, ran


def empty_call() -> float:
    """Returns the seconds of a call of TensorFlow that computes nothing."""
    nothing = tf.function(lambda: tf.zeros([])).get_concrete_function()
    times = []
    for _ in range(_EMPTY_CALLS):
        start = time.perf_counter()
        nothing().numpy()
        times.append(time.perf_counter() - start)
    return min(times)
