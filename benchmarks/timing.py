"""How contenders are measured against one another on a machine that is never quiet.

Contenders take turns in short blocks within one process, so that a disturbance or a
change of the clock rate meets all of them. What is compared are the contenders' median
step times within one round; the ratio of two contenders is the median of their ratios
over the rounds, which is steadier than the ratio of two medians.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import tensorflow as tf

Step = Callable[[], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of one contender.

    Attributes:
        first_call: Seconds for the first call, which traces and builds the step.
        losses: The losses of the first steps.
        rounds: Median step time of each round, in seconds.
    """

    first_call: float
    losses: tuple[float, ...]
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The step time, in seconds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """How far apart the middle half of the rounds lies, as a share of the median.

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


def measure(
    contenders: Mapping[str, Step], steps: int, rounds: int, warm_up: int
) -> dict[str, Measured]:
    """Measures all contenders in alternating blocks.

    Args:
        contenders: By name, what runs one step and returns the loss.
        steps: How many steps of each contender are timed, over all rounds.
        rounds: How many turns each contender gets; no more than there are steps.
        warm_up: How many steps each takes before it is timed; their losses are kept.

    Returns:
        By name, what was measured.
    """
    rounds = min(rounds, steps)
    first_calls, losses = {}, {}
    for name, step in contenders.items():
        start = time.perf_counter()
        loss = float(step())
        first_calls[name] = time.perf_counter() - start
        losses[name] = (loss, *(float(step()) for _ in range(warm_up - 1)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        for name in order:
            times[name].append(_block(contenders[name], steps // rounds))
        order = [*order[1:], order[0]]  # nobody always follows the same neighbour
    return {
        name: Measured(first_calls[name], losses[name], tuple(times[name]))
        for name in contenders
    }


def _block(step: Step, count: int) -> float:
    """Runs some steps; returns the median time of one, in seconds."""
    step()  # brings its weights back into the caches
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
