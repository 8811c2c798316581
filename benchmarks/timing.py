# SPDX-License-Identifier: Apache-2.0
"""Compares contenders on a machine that is never quiet.

Contenders take turns in short blocks, so that a disturbance or a change of the clock
rate affects all of them. The comparison uses the contenders' median step times within
one round; the ratio of two contenders is the median of their ratios over the rounds,
which is steadier than the ratio of two medians.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

Step = Callable[[], SupportsFloat]


class Sample(NamedTuple):
    """One step: its duration, in seconds, and its loss."""

    seconds: float
    loss: float


# Runs a number of steps. A contender may live in another process.
Run = Callable[[int], list[Sample]]


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurement of one contender.

    Attributes:
        first_call: Seconds for the first call, which traces and builds the step.
        losses: The losses of the first steps.
        rounds: Median step time of each round, in seconds.
    """

    first_call: float
    losses: tuple[float, ...]
    rounds: tuple[float, ...]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Measured:
        """Returns the Measured of a dict from `dataclasses.asdict` and JSON."""
        return cls(
            fields["first_call"], tuple(fields["losses"]), tuple(fields["rounds"])
        )

    @property
    def median(self) -> float:
        """The step time, in seconds."""
        return statistics.median(self.rounds)

    @property
    def fastest(self) -> float:
        """The step time of the fastest, least disturbed round, in seconds."""
        return min(self.rounds)

    @property
    def spread(self) -> float:
        """The interquartile range of the rounds, as a share of the median.

        For a contender that does the same work in each round, this is the machine's
        noise.
        """
        if len(self.rounds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / self.median


def ratio(one: Measured, other: Measured) -> float:
    """Returns how many times as long a step of `one` takes as a step of `other`."""
    return statistics.median(
        a / b for a, b in zip(one.rounds, other.rounds, strict=True)
    )


def in_turn(step: Step) -> Run:
    """Returns a run of steps in this process.

    Args:
        step: Runs one step and returns the loss when all of it is complete.
    """

    def run(count: int) -> list[Sample]:
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            loss = step()
            seconds = time.perf_counter() - start
            samples.append(Sample(seconds, float(loss)))
        return samples

    return run


def measure(
    contenders: Mapping[str, Run],
    steps: int,
    rounds: int,
    warm_up: int,
    settle: int = 1,
) -> dict[str, Measured]:
    """Measures all contenders in alternating blocks.

    Args:
        contenders: By name, a contender's run.
        steps: How many steps of each contender are timed, over all rounds.
        rounds: How many turns each contender gets; at most `steps`.
        warm_up: How many steps each runs before it is timed; their losses are kept.
        settle: How many steps of each turn are not timed: they bring the weights back
            into the caches.

    Returns:
        By name, the measurement.
    """
    rounds = min(rounds, steps)
    first = {name: run(warm_up) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        for name in order:
            samples = contenders[name](settle + steps // rounds)[settle:]
            times[name].append(statistics.median(s.seconds for s in samples))
        order = [*order[1:], order[0]]  # so that the neighbours change
    return {
        name: Measured(
            first[name][0].seconds,
            tuple(sample.loss for sample in first[name]),
            tuple(times[name]),
        )
        for name in contenders
    }


def agree(measured: Mapping[str, Measured], names: Sequence[str]) -> bool:
    """Returns whether contenders computed the same losses in their first steps.

    They add up in different orders, in float32, and the steps carry that on.
    """
    return all(
        math.isclose(one, other, rel_tol=1e-3)
        for name in names
        for one, other in zip(
            measured[names[0]].losses, measured[name].losses, strict=True
        )
    )
